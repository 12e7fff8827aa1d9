"""Implements the part that all engines of this project share (`QueuedEngine`): the state of each
trajectory, the emissions (new tokens that `poll` returns), and the counts.

All tokens are emitted before the version changes, so an emission names the version that generated
its tokens (invariant 3).
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
    """Holds the weights that an engine serves. The engine forwards its calls `prepare`, `update`
    and `read_back` to `prepare`, `load` and `compare` here. After a failed `load` the weights are a
    mixture of two versions.
    """

    def prepare(self, update: WeightUpdate) -> WeightUpdate: ...

    def load(self, update: WeightUpdate) -> None: ...

    def compare(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison: ...


class QueuedSequence:
    """Holds the state of one trajectory in an engine. `length` counts all of its tokens,
    `generated` those that an engine generated. `finish` is set when a turn is over: at a stop
    token or where no more tokens are allowed.
    """

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        self.request, self.context_max = request, context_max
        self.trajectory = request.trajectory
        self.length: int = len(request.tokens)
        self.generated: int = len(request.logprobs)
        self.finish: Literal["stop", "length"] | None = None

    @property
    def room(self) -> int:
        """The number of tokens that it may still generate within `tokens_max` and the context."""
        left = self.request.sampling.tokens_max - self.generated
        return max(0, min(left, self.context_max - self.length))

    def append(self, tokens: Tokens, noise: str) -> Tokens:
        """Add the environment's tokens after a stop. Returns the tokens for which the context has
        room; the others are dropped. The next turn draws by the name `noise`, unless it is empty.
        """
        if noise:
            self.request = replace(self.request, noise=noise)
        kept = tokens[: max(0, self.context_max - self.length)]
        self.length += len(kept)
        self.finish = None
        return kept


SequenceType = TypeVar("SequenceType", bound=QueuedSequence)


class QueuedEngine(ABC, Generic[SequenceType]):
    """Implements `Engine` for at most `slots` running sequences.

    A sequence is waiting, running (in a row of the batch), parked after a stop, or ready to
    continue after the environment appended tokens. Parked and ready sequences use no slot. Their KV
    is kept while there is room for it: `_evict_one` drops that of the sequence parked longest, and
    its tokens are prefilled again when it continues. Ready sequences enter before waiting ones.

    The calls of `Engine` move sequences between these states; an engine adds how sequences are
    decoded (`_open`, `_enter`, `_step`, `_collect`, `_park`, `_evict`, `_release`, `_kv`) and its
    weights. Requests and appended tokens are checked before anything changes; errors name the
    trajectory or the parameter.
    """

    _weights: EngineWeights

    def __init__(self, version: Version, slots: int, context_max: int, vocabulary: int) -> None:
        self.version = version
        self.slots, self.context_max, self.vocabulary = slots, context_max, vocabulary
        self._known: dict[str, SequenceType] = {}
        self._waiting: deque[SequenceType] = deque()
        self._parked: dict[str, SequenceType] = {}
        """Sequences that wait for their environment, the one parked longest first."""
        self._cached: dict[str, SequenceType] = {}
        """Those of the parked sequences whose KV may still be kept, in the same order."""
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
        """Returns a new sequence. Raises `EngineRefused` if this engine cannot serve the
        request.
        """

    @abstractmethod
    def _enter(self, sequence: SequenceType) -> bool:
        """Prefill the tokens that are not cached and run the sequence, the first of the ready or of
        the waiting ones. Returns False, and changes nothing, if it does not fit now.
        """

    @abstractmethod
    def _step(self, end_s: float) -> bool:
        """Decode once for all rows. Returns whether `poll` may continue: False once `end_s`, a time
        of the engine's clock, has passed.
        """

    @abstractmethod
    def _collect(self, sequence: SequenceType) -> tuple[Tokens, Floats, Drafts | None]:
        """Returns the tokens that were generated and not collected yet; no tokens for a sequence
        that does not run.
        """

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
        """Returns the tokens of the KV cache that running sequences use, and its capacity in
        tokens. The KV of parked sequences is not counted, because it gives way to that of others.
        """

    def _drafts(self) -> DraftStats:
        return DraftStats()

    def _load(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """Serve the weights of `update`, after all tokens were emitted."""
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
        """Run ready sequences and then waiting ones, each in their order, while slots are free. A
        sequence without room ends without another token.
        """
        while (queue := self._ready or self._waiting) and len(self._rows) < self.slots:
            sequence = queue[0]
            if not sequence.room:
                self._end_turn(sequence, "length")
            elif not self._enter_or_evict(sequence):
                break
            queue.popleft()

    def _enter_or_evict(self, sequence: SequenceType) -> bool:
        """Run the sequence; if it does not fit, drop the KV of parked sequences until it does, and
        at last its own. Returns False if running sequences leave no room for it.
        """
        while not self._enter(sequence):
            if not self._evict_one():
                self._evict(sequence)
                return self._enter(sequence)
        return True

    def _evict_one(self) -> bool:
        """Drop the KV of the sequence that was parked longest; returns False if none has any."""
        if not self._cached:
            return False
        self._evict(self._cached.pop(next(iter(self._cached))))
        return True

    def _evict_all(self) -> None:
        """Drop the KV of all parked and ready sequences; each gets it again when it continues."""
        while self._evict_one():
            pass
        for sequence in self._ready:
            self._evict(sequence)

    def _end_turn(self, sequence: SequenceType, finish: Literal["stop", "length"]) -> None:
        """Emit the last tokens of a turn, and park the sequence if more may be appended."""
        sequence.finish = finish
        self._emit(sequence)
        if sequence.request.hold and finish == "stop":
            name = sequence.trajectory
            self._parked[name] = self._cached[name] = sequence
            self._park(sequence)
        else:
            self._release(sequence)
            del self._known[sequence.trajectory]

    def _flush(self) -> None:
        """Emit all generated tokens; those of parked sequences are emitted already."""
        for name, sequence in self._known.items():
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
        """Empty the outbox and return it; [] after a failed update until another one succeeds."""
        if not self._serving:
            return []
        emissions, self._outbox = self._outbox, []
        return emissions


def check_request(request: GenerationRequest, context_max: int, vocabulary: int) -> None:
    """Raise `EngineRefused` for a request that no engine of this context and vocabulary can serve,
    for instance one that leaves no room for a generated token. A resumed trajectory may fill the
    context exactly.
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
    """Raise `EngineRefused` at the first parameter that cannot be served; the error names it."""
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
