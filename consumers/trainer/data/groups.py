"""Collects the completions and annotations of each open group, and reads again those that a
recorded take names. Invariant 2: the first completion of a trajectory in the order of its partition
counts, whatever its attempt.

Reading list: after `consumers/trainer/loop.py`, before `consumers/trainer/data/prepare.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.consumers.trainer.data.sample import REWARD, is_annotated
from rollstream.streams.admissible import is_group_full, is_usable_annotation
from rollstream.streams.bus import Bus
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.reader import Received, TopicReader, read_all_at, read_at
from rollstream.streams.records import Admitted, Annotation, Position, Record, Trajectory
from rollstream.streams.topics import is_in_key_partition
from rollstream.streams.values import Address, AnnotationUsed, Member, ReadTo


@dataclass(frozen=True, slots=True)
class ReceivedCompletion:
    """`member` is its trajectory, address and hash."""

    member: Member
    record: Trajectory


@dataclass(frozen=True, slots=True)
class ReceivedAnnotation:
    """`used` is its trajectory, name, address and hash."""

    used: AnnotationUsed
    record: Annotation


@dataclass(slots=True)
class TrainerGroup:
    """An open group: admitted, and neither taken nor closed. `at` is the address of its admission,
    `since_s` the monotonic time of its reading. `arrived` is by trajectory, `annotations` by
    (trajectory, name).
    """

    admitted: Admitted
    at: Address
    since_s: float
    names: tuple[str, ...] = (REWARD,)
    arrived: dict[str, ReceivedCompletion] = field(default_factory=dict[str, ReceivedCompletion])
    annotations: dict[tuple[str, str], ReceivedAnnotation] = field(
        default_factory=dict[tuple[str, str], ReceivedAnnotation]
    )

    def is_finished(self) -> bool:
        living = sum(arrival.record.finish != "dead" for arrival in self.arrived.values())
        samples, needed = len(self.admitted.trajectories), self.admitted.needed
        return is_group_full(samples, needed, living, len(self.arrived))

    @property
    def released(self) -> int:
        """Returns trajectories that do not count, because enough others ended first."""
        missing = len(self.admitted.trajectories) - len(self.arrived)
        return missing if self.is_finished() else 0

    def is_complete(self) -> bool:
        """Whether all trajectories that count have arrived, and each live one has the annotations
        `names` (a value, or the reason why there is none).
        """
        return self.is_finished() and all(
            is_annotated(a.record, self.names, self.annotations.keys())
            for a in self.arrived.values()
        )

    def is_overdue(self, now_s: float) -> bool:
        """Whether its deadline has passed since this trainer read its admission."""
        # Invariant 11: the time in which no trainer ran does not count.
        return now_s - self.since_s >= self.admitted.deadline_s


class GroupIntake:
    """Reads `TOPICS` from `positions`; `open` has the open groups by number, `names` the
    annotations that rewards need. `counts` counts unused records: `late` (no open group has the
    trajectory), `misplaced` (not in the group's partition), `duplicate` (not the first completion),
    `surplus` (its group was complete without it), `malformed` (an annotation without a usable
    value).
    """

    TOPICS = ("trajectories", "annotations", "admissions")

    def __init__(
        self,
        bus: Bus,
        positions: Mapping[str, Mapping[int, Position]],
        monotonic: Callable[[], float],
        names: Iterable[str] = (REWARD,),
    ) -> None:
        self._bus, self._monotonic, self._names = bus, monotonic, tuple(names)
        self._readers = {
            t: TopicReader(
                bus, t, positions[t], monotonic=monotonic, dead_letters=DeadLetterWriter(bus, t)
            )
            for t in self.TOPICS
        }
        self._ended: set[int] = set()  # groups that ended before their admission was read (resume)
        self.open: dict[int, TrainerGroup] = {}
        self.counts: Counter[str] = Counter()
        self._told = 0  # malformed annotations that `take_refused_annotations` has returned
        self.next_group = 0
        """The group after the last one whose admission was read; 0 at first."""
        self.annotated_s = 0.0
        """When the last annotation of an open group was read, monotonic."""

    def read(self, wait_s: float = 0.0) -> int:
        """Reads new records in the order that invariant 2 needs; returns the number of completions
        and annotations. Waits up to `wait_s` for a completion.
        """
        # Dispatch appends a group's admission before it assigns, so a completion that was read has
        # its admission before the present end of `admissions`; in another order a fast completion
        # could be dropped as late.
        fresh = self._readers["trajectories"].follow(wait_s)
        fresh += self._readers["annotations"].follow()
        admissions = self._readers["admissions"]
        self._admit_all(admissions.follow())
        if any(self._is_of_unknown_group(received.record) for received in fresh):
            self._admit_all(admissions.read_to(self._bus.end("admissions")))
        for received in fresh:
            self._add_record(received)
        return len(fresh)

    def end(self, group: int) -> TrainerGroup | None:
        """Removes a taken or closed group and returns it; None if its admission is not read yet.
        Its later records count as late. A resumed trainer ends the groups of recorded takes before
        it reads.
        """
        ended = self.open.pop(group, None)
        if ended is None:
            self._ended.add(group)
        return ended

    @property
    def ended(self) -> frozenset[int]:
        """Groups that ended before their admission was read: a resumed trainer repeats the ledger's
        takes first.
        """
        return frozenset(self._ended)

    def readers(self) -> list[TopicReader]:
        return list(self._readers.values())

    def positions(self) -> dict[str, dict[int, Position]]:
        return {topic: dict(reader.positions) for topic, reader in self._readers.items()}

    def read_to(self) -> tuple[ReadTo, ...]:
        """Returns how far completions and annotations were read: every record before was added,
        counted or ignored.
        """
        return tuple(
            ReadTo(
                topic, tuple(at.offset for _, at in sorted(self._readers[topic].positions.items()))
            )
            for topic in ("trajectories", "annotations")
        )

    def take_refused_annotations(self) -> int:
        new = self.counts["malformed"] - self._told
        self._told = self.counts["malformed"]
        return new

    def restore(
        self, admitted: Address, arrived: Iterable[Address], annotations: Iterable[Address]
    ) -> None:
        """Opens a group again from addresses in a checkpoint. Its deadline counts from now."""
        record = read_at(self._bus, "admissions", admitted).record
        assert isinstance(record, Admitted)
        self._admit(record, admitted, self._monotonic())
        for received in read_all_at(self._bus, "trajectories", sorted(arrived)):
            self._add_record(received)  # in the order of the partition, which decides what counts
        for received in read_all_at(self._bus, "annotations", annotations):
            self._add_record(received)

    def _is_of_unknown_group(self, record: Record) -> bool:
        return isinstance(record, Trajectory | Annotation) and record.group not in self.open

    def _admit_all(self, admissions: Iterable[Received]) -> None:
        for received in admissions:
            if isinstance(received.record, Admitted):
                self.next_group = max(self.next_group, received.record.group + 1)
                self._admit(received.record, received.address, self._monotonic())

    def _admit(self, record: Admitted, at: Address, now_s: float) -> None:
        if record.group in self._ended:
            self._ended.discard(record.group)
            return
        self.open.setdefault(record.group, TrainerGroup(record, at, now_s, self._names))

    def _add_record(self, received: Received) -> None:
        record = received.record
        if not isinstance(record, Trajectory | Annotation):
            return
        group = self.open.get(record.group)
        if group is None or record.trajectory not in group.admitted.trajectories:
            self.counts["late"] += 1
        elif not self._is_in_place(received, record.group):
            self.counts["misplaced"] += 1
        elif isinstance(record, Annotation):
            self._add_annotation(group, record, received)
        elif record.trajectory in group.arrived:
            self.counts["duplicate"] += 1
        elif group.is_finished():
            self.counts["surplus"] += 1
        else:
            member = Member(record.trajectory, received.address, received.hash)
            group.arrived[record.trajectory] = ReceivedCompletion(member, record)

    def _is_in_place(self, received: Received, group: int) -> bool:
        # All completions of a group are in the partition of its key, so they have one order; a
        # record elsewhere is not used.
        partitions = self._bus.partitions(received.topic)
        return is_in_key_partition(group, received.address.partition, partitions)

    def _add_annotation(self, group: TrainerGroup, record: Annotation, received: Received) -> None:
        # Names that the configuration does not use, and all but the first value, are ignored.
        if record.name not in self._names:
            return
        if not is_usable_annotation(record):
            self.counts["malformed"] += 1
            return
        key = (record.trajectory, record.name)
        used = AnnotationUsed(*key, received.address, received.hash)
        group.annotations.setdefault(key, ReceivedAnnotation(used, record))
        self.annotated_s = self._monotonic()
