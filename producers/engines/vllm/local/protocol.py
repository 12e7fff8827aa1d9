"""The calls from `VllmEngine` to vLLM. Weights of a running request change only between `pause` and
`resume`. A token that was computed before a pause is never returned after `pause` has returned.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rollstream.errors import EngineRefused
from rollstream.streams.values import Sampling

TEMPERATURES = (0.01, 2.0)
"""Temperatures above 0 at which vLLM draws as asked."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """The folder from which an adapter was loaded, and the number of that load over all
    adapters.
    """

    name: str
    id: int
    path: str
    load: int


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """Asks for at most `room` tokens after `tokens`. Requests of equal `salt` and `adapter` share
    blocks of the prefix cache.
    """

    key: str
    tokens: list[int]
    sampling: Sampling
    room: int
    seed: int
    salt: str
    prompt: int = 0
    group: int = 0
    place: int = 0
    stay: int = 0
    adapter: ServedAdapter | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of one request from one step. Its last output has `finish`, and vLLM's stamps of
    all its tokens: (version, index of the first token).
    """

    key: str
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    versions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PauseResult:
    """The outputs before the pause, and the keys of the dropped requests, which the caller adds
    again.
    """

    outputs: list[StepOutput]
    dropped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CoreLoad:
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0


class EngineCore(Protocol):
    """Computes tokens in vLLM. Each call raises `EngineRefused` if the engine has ended."""

    load: CoreLoad
    loads: int
    """The number of weight loads; KV blocks are shared only within one load."""
    kv_capacity: int  # in tokens

    def add(self, request: CoreRequest) -> None: ...

    def step(self, wait_s: float) -> list[StepOutput]:
        """Returns the outputs of one step; [] if no step finishes within `wait_s` seconds."""
        ...

    def pause(self) -> PauseResult:
        """Make no step until `resume`; returns the outputs that were not returned yet."""
        ...

    def resume(self) -> None: ...

    def drop(self, keys: Iterable[str]) -> None: ...

    def reset_cache(self) -> None: ...

    def release(self) -> None: ...


def check_temperature(temperature: float) -> None:
    """Raise `EngineRefused` for a temperature that vLLM would refuse or silently replace."""
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise EngineRefused(
            f"sampling.temperature {temperature} is neither 0 nor in [{low}, {high}], where vLLM "
            "draws as asked"
        )
