"""What our side and vLLM's engine say to each other, wherever that engine is: in this process, in
one of its own, or behind a URL. Plain values, and the calls that each of them answers.

What was emitted before `pause` returned is all under one version.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from producers.engines.base import Compared, Update
from streams.errors import EngineRefused
from streams.records import Sampling

TEMPERATURES = (0.01, 2.0)


@dataclass(frozen=True, slots=True)
class Order:
    """Generate `room` tokens after these. Blocks of the prefix cache are shared by equal `salt`; a
    history knows the sequence by `prompt` and `group`, a tally by `place` and `stay`.
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


@dataclass(frozen=True, slots=True)
class Gained:
    """What one step gave a request. With its end come the versions of all its tokens, as vLLM
    stamped them: (version, first token).
    """

    key: str
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    versions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Paused:
    """What the last steps gave, and the requests that were let go of: they begin anew with the
    tokens that they have.
    """

    gains: list[Gained]
    let_go: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Load:
    """As vLLM's statistics said after the newest step."""

    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0


class EngineCore(Protocol):
    """vLLM's engine. `EngineRefused` from any of these: it has ended."""

    load: Load
    loads: int
    """Times that weights were loaded: whose KV blocks may be shared."""
    kv_capacity: int

    def add(self, order: Order) -> None: ...

    def step(self, wait_s: float) -> list[Gained]:
        """What one step gave, nothing where none was done in time."""
        ...

    def pause(self) -> Paused:
        """No step is done until `resume`."""
        ...

    def resume(self) -> None: ...

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these requests; nothing more is heard of them."""
        ...

    def forget_cache(self) -> None:
        """Nothing computed so far is used again: requests begin anew with the tokens they have."""
        ...

    def give_back(self) -> None:
        """Nobody uses it from here any more."""
        ...


class Weights(Protocol):
    """What the engine serves, as `producers.engines.base.Engine` says of the three calls."""

    def prepare(self, update: Update) -> Update: ...

    def load(self, update: Update) -> None: ...

    def compare(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> Compared: ...


def check_temperature(temperature: float) -> None:
    """`EngineRefused` where vLLM would raise, or draw at another one and not say so."""
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise EngineRefused(
            f"sampling.temperature {temperature} is neither 0 nor in [{low}, {high}], where vLLM "
            "draws as asked"
        )
