"""The trainer's side of the ledger: what a term appends, and what it reads when it resumes.

A take is appended before its micro-batch is trained, a `StepDone` after its version is believed. So
after a crash the ledger names everything that may have been trained, and a take without a
`StepDone` is trained again on the same data.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream.consumers.trainer.data.poisoned_takes import TakeAttempts, SupersededTakes
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import Configured, GroupClosed, Position, Record, StepDone, Superseded, Take
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

LEDGER_KEY = "run"


@dataclass(slots=True)
class LedgerTail:
    """The ledger's records behind a checkpoint, in their order."""

    takes: dict[tuple[int, int], list[Take]] = field(
        default_factory=dict[tuple[int, int], list[Take]]
    )
    done: dict[int, StepDone] = field(default_factory=dict[int, StepDone])
    closed: list[GroupClosed] = field(default_factory=list[GroupClosed])
    configured: Configured | None = None
    believed: dict[int, Version] = field(default_factory=dict[int, Version])
    """The version of each finished step. The first `StepDone` counts; a later one is of a
    repetition with other bits.
    """
    attempts: TakeAttempts = field(default_factory=TakeAttempts)
    voided: SupersededTakes = field(default_factory=SupersededTakes)
    since: Position = field(default_factory=Position)
    """The position from which the ledger was read."""

    def apply(self, record: Record) -> None:
        self.attempts.apply(record)
        match record:
            case Take() as take:
                self.takes.setdefault((take.step, take.update), []).append(take)
            case StepDone() as done:
                self.done[done.step] = done
                self.believed.setdefault(done.step, done.version)
            case GroupClosed() as closed:
                self.closed.append(closed)
            case Superseded() as superseded:
                self.voided.apply(superseded)
            case Configured() as configured:
                self.configured = configured
            case _:
                pass

    def goes_beyond(self, step: int) -> bool:
        """Whether records of later steps are still to be repeated."""
        return any(one > step for one, _ in self.takes) or any(c.step > step for c in self.closed)

    def steps(self) -> int:
        """The highest step that has a take or a `StepDone`; 0 if none."""
        return max([step for step, _ in self.takes] + list(self.done), default=0)


class Ledger:
    """Writer of one term; thread-safe, because the publisher's thread appends `StepDone` while the
    trainer appends takes.
    """

    def __init__(self, bus: Bus, term: int) -> None:
        self._bus = bus
        self._writer = FencedWriter(bus, "ledger", "trainer", term)

    def open(self, position: Position) -> LedgerTail:
        """Fence earlier terms, then read from a checkpoint's position up to this term's `Opened`
        (invariant 7).
        """
        opened = self._writer.open()
        reader = TopicReader(self._bus, "ledger", {0: position})
        recorded = LedgerTail(since=position)
        for received in reader.read_to({0: opened[0] + 1}):
            recorded.apply(received.record)
        recorded.attempts.start()
        return recorded

    def append(self, records: Iterable[Record]) -> None:
        """Append the records in this order; they are durable when this returns."""
        entries = [(LEDGER_KEY, record) for record in records]
        if entries:
            self._writer.append(entries)

    def position(self) -> Position:
        """The ledger's end as this term knows it: everything appended so far is before it."""
        return self._writer.positions()[0]
