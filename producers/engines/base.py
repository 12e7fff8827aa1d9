"""The engine contract: what a rollout worker asks of whatever generates tokens.

* An engine stamps every generated token with the version that emitted it (invariant 3).
* Sampling is a function of (seed, trajectory, position) alone (invariant 10), `seed` being the
  run's.
* In-process engines step inside `poll`; nothing here blocks longer than the deadline given.
* What cannot be served (model, request, sampling) raises `EngineRefused` and names the part; it
  never dies later.
* After a failed `update` the engine serves nothing until an update succeeded: `poll` returns []
  meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from streams.records import Floats, Sampling, Sources, Span, Tokens, Version

UpdateMode = Literal["keep_version", "in_flight", "in_flight_recompute"]


@dataclass(frozen=True, slots=True)
class Request:
    """Generate on from here. `tokens` with their `sources` hold the prompt and everything gained so
    far.

    `logprobs` and `spans` belong to the generated ones among `tokens` (a resumed trajectory); the
    engine never recomputes or repeats them. `group` lets an engine prefill the prompt of a group
    once. `position` of a token, for its randomness, is its index in `tokens`. With `hold` the slot
    and KV cache stay after a `stop`, until `append` brings the environment's tokens or `abort` ends
    it.
    """

    trajectory: str
    group: int
    tokens: Tokens
    sources: Sources
    sampling: Sampling
    seed: int
    logprobs: Floats
    spans: tuple[Span, ...] = ()
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that one trajectory gained since its previous emission, all under one version.

    An engine emits when a trajectory finishes a turn, before its version changes, and every
    `emit_every` tokens (a setting of the engine), not at every decode step: objects per token would
    cost more than decoding.

    `finish` is None while it goes on; `stop` (the stop token is the last of `tokens`), `length`
    (`tokens_max` generated tokens, or the engine's context is full).
    """

    trajectory: str
    tokens: Tokens
    logprobs: Floats
    version: Version
    finish: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load now; KV figures count tokens. `busy_s` is CPU time spent in prefill and decode since the
    start.
    """

    slots: int
    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    steps: int
    tokens: int
    busy_s: float


class Engine(Protocol):
    version: Version

    def submit(self, request: Request) -> None:
        """Queue it; the engine admits it between two decode steps when a slot is free."""
        ...

    def poll(self, deadline_s: float) -> list[Emission]:
        """Run until something is to be said or `deadline_s` seconds passed; an idle engine returns
        [] at once.
        """
        ...

    def append(self, trajectory: str, tokens: Tokens) -> None:
        """Environment tokens for a trajectory that finished a turn (`stop`); it generates on after
        them.
        """
        ...

    def abort(self, trajectory: str) -> Emission | None:
        """Forget it and free its slot; returns what it gained since its previous emission, None if
        nothing.
        """
        ...

    def update(
        self, version: Version, tensors: Mapping[str, torch.Tensor], mode: UpdateMode
    ) -> None:
        """Serve these verified weights (checkpoint names) from the next decode step on.
        `keep_version` requires an empty engine; `in_flight` keeps the KV cache;
        `in_flight_recompute` recomputes it under the new weights.
        """
        ...

    def running(self) -> Sequence[str]:
        """Trajectories that it has, waiting ones included."""
        ...

    def stats(self) -> EngineStats: ...
