"""The protocol between the rollout and vLLM's engine, which is in this process, in one of its own,
or behind a URL: plain values, and the calls that each kind of engine implements.

All tokens that an engine returned before `pause` returned have one version.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rollstream.errors import EngineRefused
from rollstream.streams.values import Sampling

TEMPERATURES = (0.01, 2.0)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A LoRA adapter as vLLM knows it: the name and the id of its requests, the folder that it was
    loaded from, and the count of loads when it was.
    """

    name: str
    id: int
    path: str
    load: int


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request for at most `room` tokens after `tokens`. Requests of equal `salt` and `adapter`
    share blocks of the prefix cache. `prompt` and `group` identify the sequence in the draft
    history. `stay` numbers the stays of sequences in vLLM; the worker counts the drafts of a stay
    in the block `place` of the shared draft counters.
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
    """The tokens of one request from one step. The last one of a request also has the versions of
    all its tokens, as vLLM stamped them: (version, index of the first token).
    """

    key: str
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    versions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PauseResult:
    """The outputs of the last steps, and the keys of the requests that were dropped: they restart
    with the tokens that they have.
    """

    outputs: list[StepOutput]
    dropped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """vLLM's statistics after its newest step."""

    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0


class EngineCore(Protocol):
    """vLLM's engine. Each call raises `EngineRefused` when the engine has ended."""

    load: CoreLoad
    loads: int
    """How often weights were loaded; KV blocks are shared only within one load."""
    kv_capacity: int

    def add(self, request: CoreRequest) -> None: ...

    def step(self, wait_s: float) -> list[StepOutput]:
        """The outputs of one step; none if no step was finished in time."""
        ...

    def pause(self) -> PauseResult:
        """Stop stepping until `resume`."""
        ...

    def resume(self) -> None: ...

    def drop(self, keys: Iterable[str]) -> None:
        """Drop these requests; no later output contains them."""
        ...

    def reset_cache(self) -> None:
        """Drop all KV; requests restart with the tokens that they have."""
        ...

    def release(self) -> None:
        """Release the engine; it must not be used afterwards."""
        ...


def check_temperature(temperature: float) -> None:
    """Raise `EngineRefused` where vLLM would raise, or silently draw at another temperature."""
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise EngineRefused(
            f"sampling.temperature {temperature} is neither 0 nor in [{low}, {high}], where vLLM "
            "draws as asked"
        )
