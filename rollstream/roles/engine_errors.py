"""What an engine refuses when a role opens it, before the role did anything, and whether the same
start again could end otherwise.

It could not where a check of ours says so by name: the model, or a setting. It could where a
library or the machine failed (memory that somebody else has just now), where an earlier version was
served (the next may be well again), and where a server that others run is not what it must be: such
a role is started once more (`restarts.py`). A server that is away, or that another rollout claimed,
ends the role as a crash does.
"""

from collections.abc import Generator
from contextlib import contextmanager

from rollstream.errors import ConfigurationError, EngineRefused, RollstreamError


class EngineUnavailable(RollstreamError, ValueError):
    """A role was refused what it opens; perhaps not at the next start."""


@contextmanager
def classify_engine_errors(
    engine: str,
    *,
    is_server: bool = False,
    is_first: bool = True,
    instead: str = "another engine (rollouts.engine)",
) -> Generator[None]:
    """An engine is opened in the block, or a server of others, under the run's first version or a
    later one. What it refuses is raised as `ConfigurationError` when it is for good and as
    `EngineUnavailable` when it may pass; `instead` is what to choose where the model is to stay.
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
