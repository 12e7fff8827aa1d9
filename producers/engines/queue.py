"""What all engines of this project share. All tokens are emitted before the version changes
(invariant 3).
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import torch

from rollstream.errors import ContextFull, EngineRefused
from rollstream.producers.engines.base import (
    DraftStats,
    Emission,
    EngineStats,
    GenerationRequest,
    UpdateMode,
    WeightComparison,
    WeightUpdate,
)
from rollstream.streams.values import Drafts, Floats, Sampling, Tokens, Version

NO_TOKENS: tuple[Tokens, Floats] = np.zeros(0, np.uint32), np.zeros(0, np.float32)


class EngineWeights(Protocol):
    """After a failed `load` the weights are a mixture of two versions."""

    def prepare(self, update: WeightUpdate) -> WeightUpdate: ...

    def load(self, update: WeightUpdate) -> None: ...

    def compare(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison: ...


class QueuedSequence:
    """`length` counts all tokens of a trajectory, `generated` those that an engine generated.
    `finish` is set when a turn is over.
    """

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        self.request, self.context_max = request, context_max
        self.trajectory = request.trajectory
        self.length: int = len(request.tokens)
        self.generated: int = len(request.logprobs)
        self.finish: Literal["stop", "length"] | None = None

    @property
    def room(self) -> int:
        """How many tokens it may still generate within `tokens_max` and the context."""
        turn_room = self.request.sampling.tokens_max - self.generated
        return max(0, min(turn_room, self.context_max - self.length))

    def append(self, tokens: Tokens, noise: str) -> Tokens:
        """Add the environment's tokens after a stop; returns those for which the context has
        room.
        """
        if noise:
            self.request = replace(self.request, noise=noise)
        appended = tokens[: max(0, self.context_max - self.length)]
        self.length += len(appended)
        self.finish = None
        return appended


SequenceType = TypeVar("SequenceType", bound=QueuedSequence)


class QueuedEngine(ABC, Generic[SequenceType]):
    """At most `slots` sequences run.

    A sequence is waiting, running (in a row of the batch), parked after a stop, or ready to
    continue after the environment appended tokens. Parked and ready ones use no slot; their KV is
    kept while there is room, else their tokens are prefilled again. Ready sequences enter before
    waiting ones.
    """

    _weights: EngineWeights

    def __init__(self, version: Version, slots: int, context_max: int, vocabulary: int) -> None:
        self.version = version
        self.slots, self.context_max, self.vocabulary = slots, context_max, vocabulary
        self._known: dict[str, SequenceType] = {}
        self._waiting: deque[SequenceType] = deque()
        # Those that wait for their environment, the one parked longest first.
        self._parked: dict[str, SequenceType] = {}
        # Those of the parked ones whose KV may still be kept, in the same order.
        self._cached: dict[str, SequenceType] = {}
        self._ready: deque[SequenceType] = deque()
        self._outbox: list[Emission] = []
        self._serving = True
        self._steps, self._tokens = 0, 0
        self._busy_s: float = 0.0

    # ---- methods that an engine adds -----------------------------------------------------------

    @property
    @abstractmethod
    def _rows(self) -> Collection[SequenceType]:
        """The running sequences."""

    @abstractmethod
    def _open(self, request: GenerationRequest) -> SequenceType:
        """Returns a new sequence. Raises `EngineRefused` for a request that this engine cannot
        serve.
        """

    @abstractmethod
    def _enter(self, sequence: SequenceType) -> bool:
        """Prefill and run the first ready or waiting sequence. False, and nothing changes, if it
        does not fit.
        """

    @abstractmethod
    def _step(self, end_s: float) -> bool:
        """Decode once; False once `end_s`, a time of the engine's clock, has passed."""

    @abstractmethod
    def _collect(self, sequence: SequenceType) -> tuple[Tokens, Floats, Drafts | None]:
        """Returns the tokens that were not collected yet; none for a sequence that does not run."""

    @abstractmethod
    def _park(self, sequence: SequenceType) -> None:
        """Remove a sequence from the rows, and keep its cache if there is room for it."""

    @abstractmethod
    def _evict(self, sequence: SequenceType) -> None:
        """Drop the cache of a parked or ready sequence, if it has any."""

    @abstractmethod
    def _release(self, sequence: SequenceType) -> None:
        """Free the row and the cache of a sequence in any state."""

    @abstractmethod
    def _kv(self) -> tuple[int, int]:
        """Returns the KV tokens of running sequences, and the capacity in tokens."""

    def _drafts(self) -> DraftStats:
        return DraftStats()

    def _load(self, update: WeightUpdate, mode: UpdateMode) -> None:
        self._weights.load(update)

    # ---- the contract --------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        name = request.trajectory
        if name in self._known:
            raise EngineRefused(f"trajectory {name!r} is already here; abort it first")
        check_request(request, self.context_max, self.vocabulary)
        sequence = self._open(request)
        self._known[name] = sequence
        self._waiting.append(sequence)

    def poll(self, deadline_s: float) -> list[Emission]:
        end_s, began = time.monotonic() + deadline_s, time.thread_time()
        while self._serving and not self._outbox:
            self._admit()
            if not self._rows or not self._step(end_s):
                break
        self._busy_s += time.thread_time() - began
        return self._sent()

    def append(self, trajectory: str, tokens: Tokens, noise: str = "") -> None:
        sequence = self._parked.get(trajectory)
        if sequence is None:
            raise EngineRefused(f"trajectory {trajectory!r} is not held after a stop")
        if not len(tokens):
            raise EngineRefused(f"trajectory {trajectory!r}: nothing to append")
        _check_tokens(trajectory, tokens, self.vocabulary)
        del self._parked[trajectory]
        self._cached.pop(trajectory, None)
        sequence.append(tokens, noise)
        self._ready.append(sequence)

    def abort(self, trajectory: str) -> Emission | None:
        sequence = self._known.pop(trajectory, None)
        if sequence is None:
            return None
        self._cached.pop(trajectory, None)
        if self._parked.pop(trajectory, None) is None:
            self._emit(sequence)
        for queue in (self._ready, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._release(sequence)
        # `poll` empties the outbox, and between two polls only an update adds to it: one at most.
        unsent = [emission for emission in self._outbox if emission.trajectory == trajectory]
        self._outbox = [e for e in self._outbox if e.trajectory != trajectory]
        return unsent[-1] if unsent else None

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return self._weights.prepare(update)

    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        if mode == "keep_version" and self._known and update.version != self.version:
            raise EngineRefused(
                f"keep_version: {len(self._known)} trajectories are still here; nothing was changed"
            )
        # Emitted under the version that generated them (invariant 3).
        self._flush()
        self._serving = False
        self._load(update, mode)
        self.version = update.version
        self._serving = True

    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        return self._weights.compare(names, tensors)

    @property
    def versions(self) -> list[Version]:
        return [self.version]

    @property
    def is_side_by_side(self) -> bool:
        return False

    def running(self) -> list[str]:
        return list(self._known)

    def stats(self) -> EngineStats:
        used, capacity = self._kv()
        return EngineStats(
            slots=self.slots,
            running=len(self._rows),
            waiting=len(self._waiting) + len(self._ready),
            kv_used=used,
            kv_capacity=capacity,
            steps=self._steps,
            tokens=self._tokens,
            busy_s=self._busy_s,
            drafts=self._drafts(),
            parked=len(self._parked),
        )

    # ---- states --------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (queue := self._ready or self._waiting) and len(self._rows) < self.slots:
            sequence = queue[0]
            # It ends without another token.
            if not sequence.room:
                self._end_turn(sequence, "length")
            elif not self._enter_or_evict(sequence):
                break
            queue.popleft()

    def _enter_or_evict(self, sequence: SequenceType) -> bool:
        while not self._enter(sequence):
            if not self._evict_one():
                # At last its own KV: only running sequences leave it no room then.
                self._evict(sequence)
                return self._enter(sequence)
        return True

    def _evict_one(self) -> bool:
        if not self._cached:
            return False
        # The one that was parked longest.
        self._evict(self._cached.pop(next(iter(self._cached))))
        return True

    def _evict_all(self) -> None:
        while self._evict_one():
            pass
        for sequence in self._ready:
            self._evict(sequence)

    def _end_turn(self, sequence: SequenceType, finish: Literal["stop", "length"]) -> None:
        sequence.finish = finish
        self._emit(sequence)
        # More may be appended.
        if sequence.request.hold and finish == "stop":
            name = sequence.trajectory
            self._parked[name] = self._cached[name] = sequence
            self._park(sequence)
        else:
            self._release(sequence)
            del self._known[sequence.trajectory]

    def _flush(self) -> None:
        for name, sequence in self._known.items():
            # Tokens of parked sequences are emitted already.
            if name not in self._parked:
                self._emit(sequence)

    def _emit(self, sequence: SequenceType) -> None:
        tokens, logprobs, drafts = self._collect(sequence)
        if len(tokens) or sequence.finish is not None:
            name, finish = sequence.trajectory, sequence.finish
            version = sequence.request.version or self.version
            emission = Emission(name, tokens, logprobs, version, finish, drafts)
            self._outbox.append(emission)

    def _sent(self) -> list[Emission]:
        # A failed update leaves a mixture of weights until another one succeeds.
        if not self._serving:
            return []
        emissions, self._outbox = self._outbox, []
        return emissions


def check_request(request: GenerationRequest, context_max: int, vocabulary: int) -> None:
    """Raise `EngineRefused` for a request that no engine of this context and vocabulary can serve.
    A resumed trajectory may fill the context exactly.
    """
    name, count = request.trajectory, len(request.tokens)
    if not count:
        raise EngineRefused(f"trajectory {name!r}: an empty prompt, nothing to generate from")
    _check_tokens(name, request.tokens, vocabulary)
    _check_sampling(request.sampling, vocabulary)
    if count > context_max - (not len(request.logprobs)):
        raise ContextFull(
            f"trajectory {name!r}: {count} tokens leave no room to generate in a context of "
            f"{context_max}"
        )


def _check_tokens(name: str, tokens: Tokens, vocabulary: int) -> None:
    if int(tokens.max()) >= vocabulary:
        raise EngineRefused(
            f"trajectory {name!r}: token {int(tokens.max())} is outside of the vocabulary "
            f"({vocabulary})"
        )


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
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
