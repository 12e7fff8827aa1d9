"""Defines the engine contract (`Engine`): the calls through which a rollout generates tokens, their
arguments and results, and the guarantees of every engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.index import DraftSource
from rollstream.storage.weights.resident import TensorPatch
from rollstream.streams.values import Drafts, Floats, Sampling, Sources, Span, Tokens, Version

UpdateMode = Literal["keep_version", "in_flight", "in_flight_recompute"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Asks an engine to generate one trajectory. `tokens` are the prompt and all tokens generated
    or appended so far; `sources` marks each token as prompt, generated or environment.

    `logprobs` and `spans` belong to the generated tokens among them (a resumed trajectory); the
    engine never recomputes or emits these tokens again. `group` lets an engine prefill the prompt
    of a group once. The randomness of a token depends on its index in `tokens`. With `hold` the
    slot and the KV cache stay reserved after a `stop`, until `append` adds the environment's tokens
    or `abort` drops the trajectory. All tokens are generated under `version`, one of
    `Engine.versions`; with None, each token is generated under the newest version.
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
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Emission:
    """Holds the tokens generated for one trajectory since its previous emission, all under one
    version.

    An engine emits when a trajectory finishes a turn, before its version changes, and every
    `emit_every` tokens (`EngineOptions`), not at every decode step: objects per token would cost
    more than decoding.

    `finish` is None while the turn continues; `stop` (the last of `tokens` is a stop token) or
    `length` (`tokens_max` tokens are generated, or the engine's context is full). `drafts` marks
    the tokens that were drafted; None where the engine does not draft or has no such counts.
    """

    trajectory: str
    tokens: Tokens
    logprobs: Floats
    version: Version
    finish: Literal["stop", "length"] | None
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Holds the verified tensors of `version`. They differ from those of `base` only in the
    elements of `patches` and in the tensors named in `whole`. With `patches` None the difference is
    unknown and all tensors are loaded.

    The caller must not change `tensors` until the update is done. `Engine.prepare` sets `prepared`.
    With a `scaling` (alpha / rank) the tensors are those of an adapter, under PEFT's names, over
    the weights that the engine was opened with.
    """

    version: Version
    tensors: Mapping[str, torch.Tensor]
    base: Version | None = None
    patches: tuple[TensorPatch, ...] | None = None
    whole: tuple[str, ...] = ()
    prepared: object = None
    scaling: float | None = None


def merged_update(first: WeightUpdate, then: WeightUpdate) -> WeightUpdate:
    """Return `then` as an update from the base of `first`, so that `first` need not be served.
    Returns `then` unchanged if its base is not the version of `first` or a difference is unknown.
    """
    if first.patches is None or then.patches is None or then.base != first.version:
        return then
    whole = tuple(dict.fromkeys((*first.whole, *then.whole)))
    by_name: dict[str, list[TensorPatch]] = {}
    for patch in (*first.patches, *then.patches):
        if patch.name not in whole:
            by_name.setdefault(patch.name, []).append(patch)
    patches = tuple(_merged_patch(parts, then.tensors) for parts in by_name.values())
    return replace(then, base=first.base, patches=patches, whole=whole, prepared=None)


def _merged_patch(parts: Sequence[TensorPatch], tensors: Mapping[str, torch.Tensor]) -> TensorPatch:
    """Return one patch of all elements that any of the patches changes, with their new values."""
    if len(parts) == 1:
        return parts[0]
    indices = torch.unique(torch.cat([patch.indices for patch in parts]))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return replace(parts[-1], indices=indices, values=tensors[parts[-1].name].view(-1)[indices])


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """Reports a comparison of `count` tensors; `differing` names those whose served bits differ
    from the passed ones.
    """

    count: int
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counts speculative decoding since the start; all counts are 0 if the engine does not draft.

    `passes` verification passes over `rows` rows in all gave `gained` tokens. `asked` look-ups for
    a draft returned `found` drafts; `proposed` drafted tokens were verified, `accepted` of them
    accepted. `changes` counts how often drafting was turned on or off; look-ups took `lookup_s`.
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
    """Reports the engine's present load: `running` and `waiting` count sequences, `kv_used` and
    `kv_capacity` tokens. `steps`, `tokens` and `busy_s` (CPU time in prefill and decode) count from
    the start.
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
    """Generates trajectories under served weights. Every engine guarantees:

    * An engine stamps every generated token with the version that emitted it (invariant 3).
    * Sampling is a function of (seed, trajectory, position) alone (invariant 10); `seed` is that of
      the request, the run's.
    * In-process engines step inside `poll`, which returns soon after its deadline.
    * A model, request or sampling parameter that the engine cannot serve raises `EngineRefused`,
      which names it, before any token is generated.
    * After a failed `update` the engine generates nothing until an update succeeds: `poll` returns
      [] meanwhile.
    * Weights are passed as the tensors of a checkpoint, under its names; how an engine stores them
      is its own choice.
    """

    version: Version
    """The newest version that is served."""

    @property
    def versions(self) -> Sequence[Version]:
        """The versions that requests may name: the newest one and, if the engine serves adapters,
        those that its trajectories still name.
        """
        ...

    @property
    def is_side_by_side(self) -> bool:
        """Whether the engine serves adapters: a new version is then served beside those in use."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a trajectory; the engine admits it between two decode steps when a slot is free."""
        ...

    def poll(self, deadline_s: float) -> list[Emission]:
        """Run until there are emissions or `deadline_s` seconds passed, and return the emissions;
        an idle engine returns [] at once.
        """
        ...

    def append(self, trajectory: str, tokens: Tokens) -> None:
        """Add the environment's tokens to a held trajectory that finished a turn (`stop`);
        generation continues after them.
        """
        ...

    def abort(self, trajectory: str) -> Emission | None:
        """Drop a trajectory and free its slot. Returns the tokens generated since its previous
        emission, None if there are none.
        """
        ...

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Return the update with all work done for which decoding need not stop: checks, index
        arithmetic, casts. The served weights do not change. This call may run in another thread,
        beside `poll`, but beside no other update. Raises `EngineRefused`, which names the wrong
        tensor.
        """
        ...

    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """Serve these weights from the next decode step on, bit for bit the same whether they are
        patched or loaded; patches are used only if the engine serves `base`.

        With `keep_version` the engine must be empty if the version changes, except for an adapter:
        it is served beside the others, for requests that name it. `in_flight` keeps the KV cache of
        running trajectories; `in_flight_recompute` recomputes it under the new weights.
        """
        ...

    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        """Compare the served bits of the tensors `names` with the bits that loading `tensors` (a
        whole version) would give. This call may run in another thread, beside `poll`, but not
        beside `update`.
        """
        ...

    def running(self) -> Sequence[str]:
        """Return the names of the engine's trajectories, waiting ones included."""
        ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Holds the options of an engine that computes a model.

    `slots` sequences of at most `context_max` tokens are decoded together. The tokens of a running
    trajectory are emitted every `emit_every` tokens. `device` None is the CPU for the engine
    `torch`, and a GPU where there is one for `vllm`. The layers of the engine `torch` compute in
    `dtype`. With `drafts` the engine verifies drafts from this source while `gate` (default: a new
    one) finds that they save time. The engine `vllm` serves adapters of at most `adapter_rank` (0:
    no adapters); `torch` serves adapters of any rank.
    """

    slots: int
    context_max: int
    emit_every: int = 64
    device: str | None = None
    dtype: str = "float32"
    drafts: DraftSource | None = None
    gate: DraftGate | None = None
    adapter_rank: int = 0

    def __post_init__(self) -> None:
        assert min(self.slots, self.emit_every) >= 1, "at least one slot, and one token an emission"
        assert self.context_max >= 2, "a prompt token and a generated one"
