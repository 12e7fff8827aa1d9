"""The sequences of the paced engine. docs/explanation/paced-engine.md lists what is not
modelled.
"""

from dataclasses import dataclass, field
from math import log

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.paced.lengths import LengthSampler
from rollstream.producers.engines.queue import QueuedSequence
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.values import Floats, Tokens


class PacedSequence(QueuedSequence):
    """Of `length` tokens `cached` have KV; `emitted` were emitted or came with the request.

    A turn ends at length `end`: at the drawn length `stop_at` (−1: never), with a stop token as its
    last, or before that at `tokens_max` or a full context.
    """

    def __init__(
        self, request: GenerationRequest, context_max: int, vocabulary: int, lengths: LengthSampler
    ) -> None:
        super().__init__(request, context_max)
        self.vocabulary, self.lengths = vocabulary, lengths
        self.key = _key(request)
        self.prompt: Tokens = request.tokens[request.sources == PROMPT]
        self.emitted, self.cached = self.length, 0
        input_positions = np.flatnonzero(request.sources != GENERATED)
        self._begin_turn(int(input_positions[-1]) + 1 if len(input_positions) else 0)

    @property
    def pending(self) -> int:
        return self.length - self.emitted

    def gain(self, steps: int) -> None:
        self.length += steps
        self.generated += steps
        # Each step caches the token before the new one.
        self.cached += steps
        if self.length >= self.end:
            self.finish = "stop" if self.length == self.stop_at else "length"

    def append(self, tokens: Tokens, noise: str) -> Tokens:
        appended = super().append(tokens, noise)
        self.key = _key(self.request)
        self.emitted = self.length
        self._begin_turn(self.length)
        return appended

    def take(self) -> tuple[Tokens, Floats]:
        tokens = self._tokens(self.emitted, self.length)
        self.emitted = self.length
        return tokens, np.full(len(tokens), -log(self.vocabulary), np.float32)

    def _begin_turn(self, begin: int) -> None:
        request = self.request
        self.end, self.stop_at = self.length + self.room, -1
        if request.sampling.stop:
            # The draw depends on `begin`, so a resumed turn has the same end.
            turn = self.lengths.draw(request.seed, self.prompt, request.noise_name, begin)
            self.stop_at = max(begin + turn, self.length + 1)
            self.end = min(self.end, self.stop_at)

    def _tokens(self, begin: int, end: int) -> Tokens:
        drawn = uniforms(self.key, np.arange(begin, end))
        stops = sorted(set(self.request.sampling.stop))
        tokens = (drawn * (self.vocabulary - len(stops))).astype(np.int64)
        for stop in stops:
            tokens += tokens >= stop
        if self.finish == "stop" and end > begin:
            tokens[-1] = stops[int(drawn[-1] * len(stops))]
        return tokens.astype(np.uint32)


def _key(request: GenerationRequest) -> NDArray[np.uint64]:
    return np.array([trajectory_key(request.seed, request.noise_name)], np.uint64)


SPARE_SHARE = 0.01
"""Share of the capacity kept free at admission (vLLM's watermark)."""


@dataclass(slots=True)
class PacedBatch:
    """Keeps the running sequences within the KV `capacity`, in tokens, as vLLM's scheduler does.
    The cache of parked sequences is dropped first.

    * First come, first served: the first sequence enters when a slot is free and its tokens fit; no
      other overtakes it. A new sequence must leave `SPARE_SHARE` of the capacity free for the
      growth of the running ones.
    * When a step needs more capacity, the sequence that entered last is preempted: its cache is
      dropped, it waits at the head of the queue, and it is prefilled again when it enters.
    * There is always progress: one sequence alone fits (a context has at most `capacity` tokens).
    """

    capacity: int
    rows: list[PacedSequence] = field(default_factory=list[PacedSequence])
    """Running sequences, in the order in which they entered."""
    used: int = 0
    """Cached tokens of running, parked and ready sequences."""
    preempted: int = 0

    def enter(self, sequence: PacedSequence) -> int | None:
        """Run a sequence; returns the number of tokens to prefill, None if it does not fit now."""
        missing = sequence.length - 1 - sequence.cached
        if sequence.cached and self.used + missing >= self.capacity:
            return None
        if not (sequence.cached or self._fits(sequence)):
            return None
        sequence.cached += missing
        self.used += missing
        self.rows.append(sequence)
        return missing

    def is_short(self) -> bool:
        return bool(self.rows) and self.used + len(self.rows) > self.capacity

    def make_room(self) -> list[PacedSequence]:
        """Preempt sequences, the latest first, until each row can cache one more token."""
        lost: list[PacedSequence] = []
        while self.is_short():
            lost.append(self.rows.pop())
            self.drop_cache(lost[-1])
        self.preempted += len(lost)
        return lost

    def steps_max(self, emit_every: int) -> int:
        """Returns the number of steps until the next event: a turn ends, an emission is due, or the
        cache is full. Call `make_room` before.
        """
        soonest = min(min(row.end - row.length, emit_every - row.pending) for row in self.rows)
        return max(1, min(soonest, (self.capacity - self.used) // len(self.rows)))

    def gain(self, steps: int) -> None:
        for row in self.rows:
            row.gain(steps)
        self.used += steps * len(self.rows)

    def drop_cache(self, sequence: PacedSequence) -> None:
        self.used -= sequence.cached
        sequence.cached = 0

    def _fits(self, sequence: PacedSequence) -> bool:
        spare = int(SPARE_SHARE * self.capacity) if self.rows else 0
        # Every row, also the new one, caches a token in the next step.
        return self.used + sequence.length + len(self.rows) + spare <= self.capacity
