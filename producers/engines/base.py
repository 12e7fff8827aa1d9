"""Defines the engine contract (`Engine`): a rollout passes each trajectory to `submit` and calls
`poll` in its loop. Between two polls it may change the weights (`prepare`, `update`), drop
trajectories (`abort`), or continue a dialogue with the environment's tokens (`append`).

Reading list: after `producers/rollout/worker.py`, before `producers/rollout/trajectory.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray

from rollstream.storage.weights.resident import TensorPatch
from rollstream.streams.values import Drafts, Floats, Sampling, Sources, Span, Tokens, Version

UpdateMode = Literal["keep_version", "in_flight", "in_flight_recompute"]
"""The values of `rollouts.on_update` (`Engine.update`)."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Asks an engine to generate one trajectory. `tokens` are the prompt and all tokens generated
    or appended so far; `sources` marks each as prompt, generated or environment.

    `logprobs` and `spans` are those of the generated tokens among `tokens`, which the engine never
    samples or emits again. `group` lets an engine prefill the prompt of a group once. The random
    number of a token depends on the run's `seed`, the trajectory's name (or `noise`, which each
    turn of an episode has of its own) and the token's index in `tokens`. With `hold` the engine
    keeps the trajectory after a `stop`, until `append` adds the environment's tokens or `abort`
    drops it; meanwhile it uses no slot, and its KV is kept while there is room. All new tokens are
    generated under `version`, one of `Engine.versions`; with None, each under the newest version at
    that moment.
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
    noise: str = ""

    @property
    def noise_name(self) -> str:
        """The name by which random numbers are drawn."""
        return self.noise or self.trajectory


@dataclass(frozen=True, slots=True)
class Emission:
    """Holds the tokens generated for one trajectory since its previous emission, all under one
    version: when a turn finishes, before the engine's version changes, and every `emit_every`
    tokens.

    `finish` is None while the turn continues, `stop` if the last of `tokens` is a stop token,
    `length` if `tokens_max` tokens are generated or the engine's context is full. `drafts` states
    which tokens are accepted drafts, with the costs of drafting; None if the engine does not count
    them.

    `arrays` are named rows of the newest tokens (`streams/token_arrays.py`): each array [n, …] has
    the row of the newest token last, and n is at least the number of `tokens`. With more rows the
    first are those of the tokens before, e.g. of the prompt; the rollout keeps those behind the
    newest row that it has.
    An array has one type and row shape from its first row on. An engine that writes no arrays, or
    writes one for some emissions only, keeps the contract: a token without a row was generated
    without what the array describes.
    """

    # Not at every decode step: objects per token would cost more than decoding.
    trajectory: str
    tokens: Tokens
    logprobs: Floats
    version: Version
    finish: Literal["stop", "length"] | None
    drafts: Drafts | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])

    def first(self, count: int) -> "Emission":
        """Returns the emission of its first `count` tokens alone, which end by `length`."""
        cut = len(self.tokens) - count
        return replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            finish="length",
            drafts=None if cut > 0 else self.drafts,
            arrays={name: rows[: len(rows) - max(0, cut)] for name, rows in self.arrays.items()},
        )


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Holds all tensors of `version`, verified against their hashes. They differ from those of
    `base` only in the elements of `patches` and in the tensors named in `whole`. With `patches`
    None the difference is unknown, and all tensors are loaded.

    The caller must not change `tensors` until the update is done. `prepared` is the result of
    `Engine.prepare`, in the engine's own form. With a `scaling` (alpha / rank) the tensors are
    those of a LoRA adapter, under PEFT's names, for the weights that the engine was opened with.
    """

    version: Version
    tensors: Mapping[str, torch.Tensor]
    base: Version | None = None
    patches: tuple[TensorPatch, ...] | None = None
    whole: tuple[str, ...] = ()
    prepared: object = None
    scaling: float | None = None


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """Reports a comparison of `count` tensors (`Engine.read_back`); `differing` names those whose
    served bits differ.
    """

    count: int
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counts speculative decoding since the start. `passes` counts the forward passes that verified
    drafts; over `rows` rows in all they gave `gained` tokens. `asked` counts look-ups for a draft,
    which took `lookup_s` seconds; `found` of them returned one. Of `proposed` drafted tokens
    `accepted` were accepted. `changes` counts how often drafting was turned on or off.
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
    """Reports the engine's present load: `slots` sequences may run together, `running` do,
    `waiting` ones could if slots were free; `parked` ones wait for their environment. `kv_used` and
    `kv_capacity` are tokens of the KV cache, without parked sequences, whose KV gives way to that
    of others.

    Three fields count from the start: decode `steps`, generated `tokens`, and `busy_s`, the CPU
    time of this thread in prefill and decode (of the engine `paced`: the computed time).
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
    parked: int = 0


class Engine(Protocol):
    """Generates trajectories under served weights. Every engine guarantees:

    * Every emitted token is stamped with the version that generated it (invariant 3).
    * Sampling is a function of (seed, trajectory, position) alone, within the limits of invariant
      10; the seed is the run's, from the request.
    * An array of an emission whose absence would change what its log-probabilities mean has a word
      of its own (`NEEDED_ARRAYS`), which the engine's kind states (`EngineKind.needs`).
    * An engine in this process decodes inside `poll` only, which returns soon after its deadline.
    * A model, request or sampling parameter that the engine cannot serve raises `EngineRefused`,
      which names it, before any token is generated.
    * After a failed `update` the engine generates nothing until an update succeeds: `poll` returns
      [] meanwhile.
    * Weights are passed as the tensors of a checkpoint, under the checkpoint's names; how an engine
      stores them is its own choice.
    """

    version: Version
    """The newest version that is served."""

    @property
    def versions(self) -> Sequence[Version]:
        """The versions that requests may name: the newest and, if adapters are served, those that
        trajectories still name.
        """
        ...

    @property
    def is_side_by_side(self) -> bool:
        """Whether the engine serves adapters, and so several versions at once."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a trajectory; the engine admits it between two decode steps when a slot is free."""
        ...

    def poll(self, deadline_s: float) -> list[Emission]:
        """Run until there are emissions or `deadline_s` seconds passed, and return the emissions;
        an idle engine returns [] at once.
        """
        ...

    def append(self, trajectory: str, tokens: Tokens, noise: str = "") -> None:
        """Add the environment's tokens to a held trajectory that finished a turn (`stop`);
        generation continues in the next free slot. With `noise` the new turn draws its random
        numbers by this name.
        """
        ...

    def abort(self, trajectory: str) -> Emission | None:
        """Drop a trajectory and free its slot. Returns the tokens since its previous emission, None
        without any.
        """
        ...

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Returns the update with all work done for which decoding need not stop. The served
        weights do not change. May run in another thread beside `poll`, but not beside `update` or
        another `prepare`. Raises `EngineRefused`, which names the wrong tensor.
        """
        ...

    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """Emit what was generated before under its version, then serve these weights. The served
        bits are the same whether only the differences are written (if the engine serves the
        update's `base`) or all tensors are loaded.

        With `keep_version` the engine must be empty if the version changes; an adapter instead is
        served beside the others, for requests that name it. `in_flight` keeps the KV cache of
        running trajectories; `in_flight_recompute` recomputes it under the new weights.
        """
        ...

    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        """Compare the served bits of the tensors `names` with those that loading `tensors` (all of
        a version) would give. May run in another thread beside `poll`, but not beside `update`.
        """
        ...

    def running(self) -> Sequence[str]:
        """Returns the names of the engine's trajectories, waiting ones included."""
        ...

    def stats(self) -> EngineStats: ...
