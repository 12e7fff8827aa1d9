"""The trainer's side of the ledger: `Ledger` appends a term's records, `LedgerTail` collects those
that a resumed trainer repeats.

A take is appended before its micro-batch is trained, a `StepDone` after its version is believed:
after a crash the takes of a step without a `StepDone` are trained again on the same data.

Reading list: after `consumers/trainer/takes.py`, before `consumers/trainer/learn/learner.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream.consumers.trainer.data.poisoned_takes import (
    SupersededTakes,
    TakeAttempts,
    TakeNumber,
    number_of,
)
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import (
    Configured,
    GroupClosed,
    Position,
    Record,
    StepDone,
    Superseded,
    Take,
    TakesRepeated,
)
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

LEDGER_KEY = "run"


@dataclass(slots=True)
class LedgerTail:
    """Records from a checkpoint's position on, which a resumed trainer repeats."""

    takes: dict[tuple[int, int], list[Take]] = field(
        default_factory=dict[tuple[int, int], list[Take]]
    )
    """By (step, update), in the order of the ledger."""
    done: dict[int, StepDone] = field(default_factory=dict[int, StepDone])
    """The newest of each finished step."""
    closed: list[GroupClosed] = field(default_factory=list[GroupClosed])
    configured: Configured | None = None
    """The newest `Configured`: the settings and code revision that a term runs with."""
    believed: dict[int, Version] = field(default_factory=dict[int, Version])
    """The version of each finished step, by its first `StepDone`; a repetition with other bits adds
    a later one.
    """
    attempts: TakeAttempts = field(default_factory=TakeAttempts)
    superseded: SupersededTakes = field(default_factory=SupersededTakes)
    repeated: dict[tuple[int, int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int, int], tuple[int, ...]]
    )
    """The micro-batches of the newest repetition by step, update and epoch."""
    since: Position = field(default_factory=Position)
    since_configuration: str = ""
    """Hash of the configuration of the records up to the first `Configured`."""
    taken_under: dict[TakeNumber, str] = field(default_factory=dict[TakeNumber, str])
    """Hash of the configuration of each take's term."""

    def apply(self, record: Record) -> None:
        self.attempts.apply(record)
        match record:
            case Take() as take:
                self.takes.setdefault((take.step, take.update), []).append(take)
                now = self.configured
                under = self.since_configuration if now is None else now.configuration_hash
                self.taken_under[number_of(take)] = under
            case StepDone() as done:
                self.done[done.step] = done
                self.believed.setdefault(done.step, done.version)
            case GroupClosed() as closed:
                self.closed.append(closed)
            case Superseded() as superseded:
                self.superseded.apply(superseded)
            case TakesRepeated() as again:
                self.repeated[again.step, again.update, again.epoch] = again.micro_batches
            case Configured() as configured:
                self.configured = configured
            case _:
                pass

    def groups_done(self, step: int, update: int) -> int | None:
        """The number of groups that an update of a finished step took; None if the step is not
        finished or its takes are repeated already.
        """
        if step not in self.done or (step, update) not in self.takes:
            return None
        # A repetition takes as many, however many groups a step has by now.
        return sum(len(take.groups) for take in self.takes[step, update])

    def goes_beyond(self, step: int) -> bool:
        """Takes or closed groups of steps after `step` are recorded."""
        return any(take_step > step for take_step, _ in self.takes) or any(
            c.step > step for c in self.closed
        )

    def steps(self) -> int:
        """The highest step that has a take or a `StepDone`; 0 if none."""
        return max([step for step, _ in self.takes] + list(self.done), default=0)


class Ledger:
    """Appends one term's records; call `open` first. Thread-safe: the publisher's thread appends
    `StepDone` beside the trainer's takes.
    """

    def __init__(self, bus: Bus, term: int) -> None:
        self._bus = bus
        self._writer = FencedWriter(bus, "ledger", "trainer", term)

    def open(self, position: Position, configuration_hash: str = "") -> LedgerTail:
        """Appends this term's `Opened`, after which records of earlier terms are void (invariant
        7), and returns the records from `position` up to it. Position and configuration are those
        of the checkpoint.
        """
        opened = self._writer.open()
        reader = TopicReader(self._bus, "ledger", {0: position})
        recorded = LedgerTail(since=position, since_configuration=configuration_hash)
        for received in reader.read_to({0: opened[0] + 1}):
            recorded.apply(received.record)
        recorded.attempts.start()
        return recorded

    def append(self, records: Iterable[Record]) -> None:
        """They are durable on return."""
        entries = [(LEDGER_KEY, record) for record in records]
        if entries:
            self._writer.append(entries)

    def position(self) -> Position:
        """The position after this term's last record, for its successor's checkpoint."""
        return self._writer.positions()[0]


STATE_HASH_BYTES_MAX = 1_000_000_000
"""Largest state (masters and moments, 12 B a parameter) that is hashed at every step. One core
reads about 10 GB/s, so this is a tenth of a second.
"""


def hashes_state(state_bytes: int, recorded: StepDone | None) -> bool:
    """Whether the trainer itself hashes its state at this step; the publisher hashes a large one,
    at checkpoints alone.
    """
    # A repeated step without a recorded `weights_hash` has only the state to compare.
    return state_bytes <= STATE_HASH_BYTES_MAX or (
        recorded is not None and not recorded.weights_hash
    )
