"""Which sequences of the paced engine run and which wait, under a limit of slots and of KV
capacity, as in vLLM's scheduler.

* First come, first served: the first sequence of the queue enters when a slot is free and its
  tokens fit; no other overtakes it. A new sequence leaves `SPARE_SHARE` of the capacity free for
  the growth of those that run.
* When a step needs more capacity than is left, the sequence that entered last is preempted: its
  cache is dropped, it waits at the head of the queue, and it is prefilled again when it enters.
* The oldest sequence always fits (the context is at most the capacity), so there is always
  progress.

A sequence has KV for all of its tokens but the newest, which is the input of the next step.

A sequence keeps counts only, because its tokens follow from their positions: a token is a function
of (seed, trajectory, position) and of the vocabulary alone (invariant 10). Each turn has a drawn
length. Its last token is a stop token, all others are uniform over the tokens that are no stop
tokens. If the request names no stop tokens, a turn continues to `tokens_max`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log
from typing import Literal

import numpy as np

from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.producers.engines.paced.lengths import LengthSampler
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.values import Floats, Tokens, Version


class PacedSequence:
    """`length` counts all tokens so far, `cached` those with KV, `emitted` those that were emitted
    or were part of the request. `end` is the length at which the turn is over, `stop_at` the length
    at which its stop token is drawn (−1: never).
    """

    __slots__ = (
        "cached", "context_max", "emitted", "end", "finish", "generated", "hold", "key", "length",
        "lengths", "prompt", "request", "stop_at", "vocabulary",
    )  # fmt: skip

    def __init__(
        self, request: GenerationRequest, context_max: int, vocabulary: int, lengths: LengthSampler
    ) -> None:
        self.request, self.context_max, self.vocabulary = request, context_max, vocabulary
        self.lengths = lengths
        self.key = np.array([trajectory_key(request.seed, request.trajectory)], np.uint64)
        self.prompt: Tokens = request.tokens[request.sources == PROMPT]
        self.length = self.emitted = len(request.tokens)
        self.generated = len(request.logprobs)
        self.hold = request.hold
        self.finish: Literal["stop", "length"] | None = None
        self.cached = 0
        given = np.flatnonzero(request.sources != GENERATED)
        self._begin_turn(int(given[-1]) + 1 if len(given) else 0)

    @property
    def trajectory(self) -> str:
        return self.request.trajectory

    @property
    def full(self) -> bool:
        return self.length >= self.end

    @property
    def pending(self) -> int:
        """Tokens that were generated and not emitted."""
        return self.length - self.emitted

    def gain(self, steps: int) -> None:
        """Generate one token per step; each step caches the token before."""
        self.length += steps
        self.generated += steps
        self.cached += steps
        if self.full:
            self.finish = "stop" if self.length == self.stop_at else "length"

    def append(self, tokens: Tokens) -> None:
        """Append the environment's tokens; those beyond the context are dropped."""
        self.length += min(len(tokens), self.context_max - self.length)
        self.emitted, self.finish = self.length, None
        self._begin_turn(self.length)

    def emit(self, version: Version) -> Emission:
        """The emission of all tokens that were not emitted yet."""
        tokens = self._tokens(self.emitted, self.length)
        self.emitted = self.length
        logprobs: Floats = np.full(len(tokens), -log(self.vocabulary), np.float32)
        return Emission(self.trajectory, tokens, logprobs, version, self.finish)

    def _begin_turn(self, begin: int) -> None:
        """Draw the length at which the turn that starts at `begin` ends, within the limits."""
        request, sampling = self.request, self.request.sampling
        left = sampling.tokens_max - self.generated
        self.end, self.stop_at = min(self.context_max, self.length + left), -1
        if sampling.stop:
            turn = self.lengths.draw(request.seed, self.prompt, request.trajectory, begin)
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


SPARE_SHARE = 0.01
"""Share of the capacity kept free at admission (vLLM's watermark). Without it the sequence that
enters last is preempted at once.
"""


@dataclass(slots=True)
class PacedBatch:
    """Every sequence is in one state: running, held after a stop, ready to continue, or waiting."""

    slots: int
    capacity: int
    rows: list[PacedSequence] = field(default_factory=list[PacedSequence])
    """Running sequences, in the order in which they entered."""
    held: dict[str, PacedSequence] = field(default_factory=dict[str, PacedSequence])
    """Sequences whose slots and caches stay reserved; ready ones are among them."""
    ready: deque[PacedSequence] = field(default_factory=deque[PacedSequence])
    waiting: deque[PacedSequence] = field(default_factory=deque[PacedSequence])
    used: int = 0
    """Cached tokens of running and held sequences."""
    preempted: int = 0
    """How often a sequence lost its cache."""

    def enter(self) -> tuple[int, list[PacedSequence]]:
        """Admit all sequences that may run. Returns the number of tokens to prefill, and the
        sequences that are already full and end without another token.

        Ready sequences enter first, in their own slots, then the queue.
        """
        tokens, full = 0, list[PacedSequence]()
        while self.ready:
            sequence = self.ready.popleft()
            del self.held[sequence.trajectory]
            missing = sequence.length - 1 - sequence.cached
            if sequence.full:
                full.append(self._dropped(sequence))
            elif self.used + missing < self.capacity:
                tokens += self._entered(sequence, missing)
            else:
                self.waiting.appendleft(self._dropped(sequence))
                self.preempted += 1
        while self.waiting and len(self.rows) + len(self.held) < self.slots:
            sequence = self.waiting[0]
            if not sequence.full and not self._fits(sequence):
                break
            self.waiting.popleft()
            if sequence.full:
                full.append(sequence)
            else:
                tokens += self._entered(sequence, sequence.length - 1)
        return tokens, full

    def make_room(self) -> None:
        """Preempt sequences until every remaining row can cache one more token."""
        while self.rows and self.used + len(self.rows) > self.capacity:
            self.waiting.appendleft(self._dropped(self.rows.pop()))
            self.preempted += 1

    def steps_max(self, emit_every: int) -> int:
        """Steps until the next event: a turn ends, tokens are due for emission, or the cache is
        full. `make_room` must have been called before.
        """
        soonest = min(min(row.end - row.length, emit_every - row.pending) for row in self.rows)
        return max(1, min(soonest, (self.capacity - self.used) // len(self.rows)))

    def gain(self, steps: int) -> None:
        """Every row generates one token per step."""
        for row in self.rows:
            row.gain(steps)
        self.used += steps * len(self.rows)

    def end(self, sequence: PacedSequence, hold: bool) -> None:
        """Remove a sequence from the rows; with `hold` its slot and cache stay reserved."""
        self.rows.remove(sequence)
        if hold:
            self.held[sequence.trajectory] = sequence
        else:
            self._dropped(sequence)

    def resume(self, sequence: PacedSequence) -> None:
        """Queue a held sequence to continue: the environment has appended its tokens."""
        self.ready.append(sequence)

    def drop(self, sequence: PacedSequence) -> None:
        """Remove a sequence in any state, with its cache."""
        self.held.pop(sequence.trajectory, None)
        for place in (self.rows, self.ready, self.waiting):
            if sequence in place:
                place.remove(sequence)
        self._dropped(sequence)

    def all_sequences(self) -> Iterable[PacedSequence]:
        """All sequences, each once."""
        return (*self.rows, *self.held.values(), *self.waiting)

    def _fits(self, sequence: PacedSequence) -> bool:
        """Whether a waiting sequence fits; its first step also caches its newest token."""
        spare = int(SPARE_SHARE * self.capacity) if self.rows else 0
        return self.used + sequence.length + len(self.rows) + spare <= self.capacity

    def _entered(self, sequence: PacedSequence, missing: int) -> int:
        sequence.cached += missing
        self.used += missing
        self.rows.append(sequence)
        return missing

    def _dropped(self, sequence: PacedSequence) -> PacedSequence:
        self.used -= sequence.cached
        sequence.cached = 0
        return sequence
