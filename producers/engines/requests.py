"""Checks that all engines make before they accept a request, and removal of unsent emissions. Each
error names the trajectory or the parameter.
"""

from collections.abc import Container

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.streams.values import Sampling, Tokens


def check_request(request: GenerationRequest, known: Container[str], vocabulary: int) -> None:
    """Raise `EngineRefused` for a request that no context length can serve. `known` holds the
    trajectories that the engine already has.
    """
    name = request.trajectory
    if name in known:
        raise EngineRefused(f"trajectory {name!r} is already here; abort it first")
    if not len(request.tokens):
        raise EngineRefused(f"trajectory {name!r}: an empty prompt, nothing to generate from")
    _check_tokens(name, request.tokens, vocabulary)
    _check_sampling(request.sampling, vocabulary)


def check_room(request: GenerationRequest, context_max: int) -> None:
    """Raise `EngineRefused` where the context has no room for one generated token. A resumed
    trajectory may fill the context exactly.
    """
    if len(request.tokens) > context_max - (not len(request.logprobs)):
        raise EngineRefused(
            f"trajectory {request.trajectory!r}: {len(request.tokens)} tokens leave no room to "
            f"generate in a context of {context_max}"
        )


def check_append(trajectory: str, tokens: Tokens, vocabulary: int) -> None:
    """Raise `EngineRefused` unless there are tokens and all of them are in the vocabulary."""
    if not len(tokens):
        raise EngineRefused(f"trajectory {trajectory!r}: nothing to append")
    _check_tokens(trajectory, tokens, vocabulary)


def _check_tokens(name: str, tokens: Tokens, vocabulary: int) -> None:
    if int(tokens.max()) >= vocabulary:
        raise EngineRefused(
            f"trajectory {name!r}: token {int(tokens.max())} is outside of the vocabulary "
            f"({vocabulary})"
        )


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise `EngineRefused`, which names the first parameter that cannot be served."""
    if sampling.temperature < 0 or not sampling.temperature < float("inf"):
        raise EngineRefused(f"sampling.temperature {sampling.temperature} is not 0 or above")
    if sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
        raise EngineRefused(
            f"sampling.top_k {sampling.top_k} must be 0 (off) or above, "
            f"sampling.top_p {sampling.top_p} above 0 and at most 1 (off)"
        )
    if sampling.tokens_max < 1:
        raise EngineRefused(f"sampling.tokens_max {sampling.tokens_max} leaves nothing to generate")
    if any(not 0 <= token < vocabulary for token in sampling.stop):
        raise EngineRefused(
            f"sampling.stop {sampling.stop} is outside of the vocabulary ({vocabulary})"
        )


def take_back(outbox: list[Emission], trajectory: str) -> Emission | None:
    """Remove and return the emission of an aborted trajectory that `poll` has not returned.

    There is at most one: `poll` empties the outbox, and between two polls only an update adds to
    it.
    """
    pending = [emission for emission in outbox if emission.trajectory == trajectory]
    outbox[:] = [emission for emission in outbox if emission.trajectory != trajectory]
    return pending[-1] if pending else None
