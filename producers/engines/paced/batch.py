"""Who runs and who waits, under slots and a KV capacity that binds, as vLLM's scheduler has it.

* First come, first served: the first in the queue enters when a slot is free and its tokens fit;
  nobody overtakes it. Newcomers leave `SPARE` of the capacity to the growth of those who run.
* When a step needs more than is left, the sequence that entered last is preempted: its cache is
  dropped, it waits at the head of the queue, and all of it is prefilled anew when it enters again.
* The oldest always fits (the context is at most the capacity), so somebody always goes on.

A sequence has KV for all of its tokens but the newest, which the next step takes as its input.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from producers.engines.paced.sequence import Sequence

SPARE = 0.01
"""Of the capacity, vLLM's watermark: without it who enters last is preempted at once."""


@dataclass(slots=True)
class Batch:
    """Every sequence is in one place: running, held after a stop, ready to go on, or waiting."""

    slots: int
    capacity: int
    rows: list[Sequence] = field(default_factory=list[Sequence])
    """In the order of their entering."""
    held: dict[str, Sequence] = field(default_factory=dict[str, Sequence])
    """Slots and caches that stay reserved, of ready sequences too."""
    ready: deque[Sequence] = field(default_factory=deque[Sequence])
    waiting: deque[Sequence] = field(default_factory=deque[Sequence])
    used: int = 0
    """Tokens cached, of running and held ones."""
    preempted: int = 0
    """Times that a sequence lost its cache."""

    def enter(self) -> tuple[int, list[Sequence]]:
        """Let in whoever may; returns the tokens to be prefilled and those that are full already.

        First those that the environment answered, in their own slots, then the queue.
        """
        tokens, full = 0, list[Sequence]()
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
        """Preempt until every row can cache one token more."""
        while self.rows and self.used + len(self.rows) > self.capacity:
            self.waiting.appendleft(self._dropped(self.rows.pop()))
            self.preempted += 1

    def steps_max(self, emit_every: int) -> int:
        """Steps until something happens: a turn ends, tokens are to be emitted, the cache is full;
        `make_room` came before.
        """
        soonest = min(min(row.end - row.length, emit_every - row.unsaid) for row in self.rows)
        return max(1, min(soonest, (self.capacity - self.used) // len(self.rows)))

    def gain(self, steps: int) -> None:
        """Every row gains a token per step."""
        for row in self.rows:
            row.gain(steps)
        self.used += steps * len(self.rows)

    def end(self, sequence: Sequence, hold: bool) -> None:
        """It leaves the rows; with `hold` its slot and cache stay."""
        self.rows.remove(sequence)
        if hold:
            self.held[sequence.trajectory] = sequence
        else:
            self._dropped(sequence)

    def go_on(self, sequence: Sequence) -> None:
        """The environment answered a held one."""
        self.ready.append(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Wherever it is."""
        self.held.pop(sequence.trajectory, None)
        for place in (self.rows, self.ready, self.waiting):
            if sequence in place:
                place.remove(sequence)
        self._dropped(sequence)

    def everyone(self) -> Iterable[Sequence]:
        """Each once."""
        return (*self.rows, *self.held.values(), *self.waiting)

    def _fits(self, sequence: Sequence) -> bool:
        """Its newest token is cached by its first step."""
        spare = int(SPARE * self.capacity) if self.rows else 0
        return self.used + sequence.length + len(self.rows) + spare <= self.capacity

    def _entered(self, sequence: Sequence, missing: int) -> int:
        sequence.cached += missing
        self.used += missing
        self.rows.append(sequence)
        return missing

    def _dropped(self, sequence: Sequence) -> Sequence:
        self.used -= sequence.cached
        sequence.cached = 0
        return sequence
