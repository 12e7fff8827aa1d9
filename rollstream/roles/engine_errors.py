"""Classifies the errors of opening an engine, before the role has done any work: final, or worth
another start.

An error is final if one of our checks refuses the model or a setting by name. It is not final if a
library or the machine failed (for example, memory that another process uses now), if a later
version was refused (the next one may be accepted), or if an external server is misconfigured: then
the role is started once more. An unreachable server, or one that another rollout has claimed, ends
the role like a crash.
"""

from collections.abc import Generator
from contextlib import contextmanager

from rollstream.errors import ConfigurationError, EngineRefused, RollstreamError


class EngineUnavailable(RollstreamError, ValueError):
    """An engine or server could not be opened; another start may succeed."""


@contextmanager
def classify_engine_errors(
    engine: str,
    *,
    is_server: bool = False,
    is_first: bool = True,
    instead: str = "another engine (rollouts.engine)",
) -> Generator[None]:
    """An engine, or an external server, is opened in the block, with the run's first version or a
    later one. Its refusal is raised as `ConfigurationError` if it is final and as
    `EngineUnavailable` if not; `instead` names the alternative to another model.
    """
    try:
        yield
    except EngineRefused as error:
        if is_server:
            raise
        kind = ConfigurationError if is_first and error.__cause__ is None else EngineUnavailable
        raise kind(
            f"engine {engine!r} cannot serve this run's model: {error}; choose another model "
            f"(model.path) or {instead}"
        ) from error
    except ConfigurationError as error:
        if not is_server:
            raise
        raise EngineUnavailable(str(error)) from error
