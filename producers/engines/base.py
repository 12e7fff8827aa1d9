"""The engine contract: what a rollout worker asks of whatever generates tokens.

* An engine stamps every generated token with the version that emitted it (invariant 3).
* Sampling is a function of (seed, trajectory, position) alone (invariant 10), `seed` being the
  run's.
* In-process engines step inside `poll`; nothing here blocks longer than the deadline given.
* What cannot be served (model, request, sampling) raises `EngineRefused` and names the part; it
  never dies later.
* After a failed `update` the engine serves nothing until an update succeeded: `poll` returns []
  meanwhile.
* Weights are the tensors of a checkpoint, under its names; how an engine keeps them is its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from storage.versions.held import Patch
from streams.records import Drafts, Floats, Sampling, Sources, Span, Tokens, Version

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
    (`tokens_max` generated tokens, or the engine's context is full). `drafts` says which of the
    tokens were guessed; None where nothing is drafted, or the engine cannot say.
    """

    trajectory: str
    tokens: Tokens
    logprobs: Floats
    version: Version
    finish: Literal["stop", "length"] | None
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The verified tensors of `version`, and how they differ from those of `base`: only in the
    elements of `patches` and in the tensors named in `whole`. `patches` None: unknown, so all is
    loaded.

    `tensors` must stay as they are until the update is done. `prepared` is the engine's own.
    """

    version: Version
    tensors: Mapping[str, torch.Tensor]
    base: Version | None = None
    patches: tuple[Patch, ...] | None = None
    whole: tuple[str, ...] = ()
    prepared: object = None


@dataclass(frozen=True, slots=True)
class Compared:
    """How many of the tensors asked for the engine serves, and which of these are not what it was
    given.
    """

    count: int
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Drafts since the start; all 0 where nothing is drafted. `passes` verified drafts of so many
    `rows` in all and gave `gained` tokens; of `asked` drafts the source had `found`, with
    `proposed` tokens, of which `accepted` were right. `changes` counts how often drafting began or
    ended, `lookup_s` is the time spent asking.
    """

    passes: int = 0
    rows: int = 0
    gained: int = 0
    asked: int = 0
    found: int = 0
    proposed: int = 0
    accepted: int = 0
    changes: int = 0
    lookup_s: float = 0.0


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
    drafts: DraftStats = DraftStats()


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

    def prepare(self, update: Update) -> Update:
        """The same update with everything done that need not stop decoding: checks, index
        arithmetic, casts. Changes nothing that is served; may run in another thread, beside `poll`,
        while no other update does. `EngineRefused` names the tensor that is wrong.
        """
        ...

    def update(self, update: Update, mode: UpdateMode) -> None:
        """Serve these weights from the next decode step on, bit for bit the same whether they were
        patched or loaded; patches are used only if `base` is what the engine serves.

        Another version under `keep_version` requires an empty engine; `in_flight` keeps the KV
        cache; `in_flight_recompute` recomputes it under the new weights.
        """
        ...

    def read_back(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> Compared:
        """Compare the bits that are served with those that loading these tensors of `tensors` (a
        whole version's) would give. May run in another thread, beside `poll`, not beside `update`.
        """
        ...

    def running(self) -> Sequence[str]:
        """Trajectories that it has, waiting ones included."""
        ...

    def stats(self) -> EngineStats: ...
