"""All messages of a topic once, in the order of each partition, wherever they lie: archived rows
below what the log keeps, then the log. It only reads.

What is neither archived nor kept is a hole: the caller is told of it, with the fence behind it. An
archived row is given as the bytes that it had in the log, compared with the hash beside it.
"""

# pyarrow ships no types
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from consumers.audit.rows import Rows, pieces
from consumers.audit.tally import Tally
from storage.archive.names import ArchiveFile
from storage.archive.reading import archived_files
from storage.objects import ObjectStore
from streams.bus import Bus, Message
from streams.errors import BusError, CorruptObject, PositionLost
from streams.records import Address, Fence, Position
from streams.truncation import truncated_begin

RECORDS_MAX = 1024  # of one read
ROUNDS_MAX = 100  # a topic that is truncated under the reader is looked for again this often


@dataclass(frozen=True, slots=True)
class Hole:
    """Offsets `[start, end)` are gone; `fence` stands behind them, empty where nobody knows it."""

    partition: int
    start: int
    end: int
    fence: Fence


@dataclass(slots=True)
class Source:
    """A run's log, its store, or both; `tally` is the audit's line about what was read."""

    bus: Bus | None
    store: ObjectStore | None
    run: str
    tally: Tally
    _ends: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    _at: dict[int, int] = field(default_factory=dict[int, int])
    is_archived: bool = False
    """Whether the message given last is an archived row."""

    def fix_end(self, topic: str) -> None:
        """What is appended to this topic from now on is not looked at; nothing for one that the log
        has not.
        """
        if self.bus is None:
            return
        try:
            self.bus.settings(topic)
        except BusError as error:  # there is no class of its own for this one
            if "has no topic" not in str(error):
                raise
            return
        self._ends[topic] = self.bus.end(topic)

    def has_log(self, topic: str) -> bool:
        return topic in self._ends

    def messages(self, topic: str) -> Iterator[Message | Rows | Hole]:
        """The topic, with a `Hole` where something is gone; archived trajectories come as rows."""
        self._at = {}
        if topic not in self._ends:
            yield from self._archived(topic, None)
            return
        ends = self._ends[topic]
        self._at = dict.fromkeys(ends, 0)
        for _ in range(ROUNDS_MAX):
            assert self.bus is not None
            begin = truncated_begin(self.bus, topic)
            yield from self._archived(topic, begin)
            yield from self._passed_over(begin, ends)
            try:
                yield from self._live(topic, ends)
            except PositionLost:  # truncated meanwhile: what went is archived, or a hole
                continue
            return
        self.tally.cannot(f"{topic} was truncated faster than it could be read")

    def _passed_over(
        self, begin: Mapping[int, Position], ends: Mapping[int, int]
    ) -> Iterator[Hole]:
        for partition, position in begin.items():
            start, end = self._at[partition], min(position.offset, ends[partition])
            if start < end:
                self._at[partition] = position.offset
                yield Hole(partition, start, end, position.fence)

    def _live(self, topic: str, ends: Mapping[int, int]) -> Iterator[Message]:
        assert self.bus is not None
        is_compacted = self.bus.settings(topic).cleanup == "compact"
        for partition, end in ends.items():
            while self._at[partition] < end:
                offset = self._at[partition]
                read = self.bus.read(topic, {partition: offset}, records_max=RECORDS_MAX)
                wanted = [message for message in read if message.offset < end]
                if not wanted:
                    self._missing(topic, partition, offset, end, is_compacted)
                    break
                for message in wanted:
                    self._missing(
                        topic, partition, self._at[partition], message.offset, is_compacted
                    )
                    self._at[partition] = message.offset + 1
                    self.tally.counts["from the log"] += 1
                    self.is_archived = False
                    yield message

    def _missing(
        self, topic: str, partition: int, start: int, end: int, is_compacted: bool
    ) -> None:
        if start < end and not is_compacted:
            at = Address(partition, start)
            self.tally.offend(f"offsets {start} to {end - 1} are missing", topic, at)

    def _archived(
        self, topic: str, begin: Mapping[int, Position] | None
    ) -> Iterator[Message | Rows | Hole]:
        """Archived rows from where we are, below what the log keeps (all, where it has none)."""
        if self.store is None:
            return
        # The offset after the last row of each partition's last file; where the log was truncated
        # under us and we are here again, not of files that were read the first time.
        reached: dict[int, int] = {}
        for file in archived_files(self.store, self.run, topic):
            at = self._at.setdefault(file.partition, 0)
            if file.first < reached.get(file.partition, 0):
                where = f"{topic}/{file.partition}"
                self.tally.offend(f"{where}: offset {file.first} is archived twice", key=file.key)
            high = None if begin is None else begin[file.partition].offset
            if high is not None and (file.first >= high or at >= high):
                continue
            if file.first > at:
                yield Hole(file.partition, at, file.first, Fence())
                self._at[file.partition] = file.first
            yield from self._rows(topic, file, high)
            if file.first >= at:
                reached[file.partition] = self._at[file.partition]

    def _reach(self, topic: str, partition: int, piece: Message | Rows) -> None:
        """An archived file holds every offset from its first to its last."""
        is_one = isinstance(piece, Message)
        first, count = (piece.offset, 1) if is_one else (piece.first, len(piece))
        self._missing(topic, partition, self._at[partition], first, is_compacted=False)
        self._at[partition] = first + count
        self.tally.counts["from the archive"] += count

    def _rows(self, topic: str, file: ArchiveFile, high: int | None) -> Iterator[Message | Rows]:
        from storage.archive.messages import batches_of  # pyarrow: only where rows are archived
        from storage.archive.values import Originals

        assert self.store is not None
        partition, originals = file.partition, Originals(topic)
        try:
            for batch in batches_of(self.store, file):
                for piece in pieces(batch, originals, partition, self._at[partition], high):
                    self._reach(topic, partition, piece)
                    self.is_archived = True
                    yield piece
        except CorruptObject as error:
            self.tally.offend(str(error), key=file.key)
