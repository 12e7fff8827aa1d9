"""A run's log with its archive in front of it: truncated records are read from the archive, at the
same offsets and byte for byte.

`LogWithArchive` is a read-only bus: nothing is written into the run, not even to `.dead`.
`whole_topic` reads all records of one topic from the very first: archived rows, then the log. Each
record is returned once, by its offset; records that are neither archived nor kept (in a run without
an archive) are skipped.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from rollstream.errors import BusError, PositionLost
from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.archive.originals import OriginalBytes
from rollstream.storage.archive.reading import (
    archived_files,
    archived_to,
    batches_from,
    damaged_file,
    table_from,
)
from rollstream.storage.archive.tables import records_of
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Opened, Position, Record
from rollstream.streams.topics import Topic, catalogue

_NEEDED = (
    "offset", "timestamp", "key", "schema", "hash", "term", "sequence", "void", "reason",
    "original",
)  # fmt: skip


def messages_of(store: ObjectStore, topic: str, file: ArchiveFile) -> Iterator[Message]:
    """The file's messages in the order of their offsets. Raises `CorruptObject` at a row that
    differs from its hash, or if the file is not an archive file.
    """
    originals = OriginalBytes(topic)
    for batch in batches_of(store, file):
        yield from messages_in(batch, originals, file.partition)


def batches_of(store: ObjectStore, file: ArchiveFile) -> Iterator[pa.RecordBatch]:
    """The file's rows in the order of their offsets. Raises `CorruptObject` if it is not an archive
    file.
    """
    for batch in batches_from(store, file):
        lacking = [name for name in _NEEDED if name not in batch.schema.names]
        if lacking:
            raise damaged_file(file, f"it lacks {', '.join(lacking)}")
        yield batch


def messages_in(
    batch: pa.RecordBatch, originals: OriginalBytes, partition: int
) -> Iterator[Message]:
    """The messages of these rows. Raises `CorruptObject` at a row that differs from its hash."""
    offsets = batch.column("offset").to_numpy().tolist()
    stamps = batch.column("timestamp").cast("int64").to_numpy().tolist()
    keys = batch.column("key").to_numpy(zero_copy_only=False).tolist()
    values = originals.values(batch)
    for offset, stamp, key, value in zip(offsets, stamps, keys, values, strict=True):
        yield Message(originals.topic, partition, offset, stamp, key.encode(), value)


FILES_MAX = 6  # archived files cached in memory: takes read one file per partition in order


class LogWithArchive:
    """A read-only `Bus`. `bus` None: only the archive exists. `run` is the run's name in the
    archive.
    """

    def __init__(self, bus: Bus | None, store: ObjectStore | None, run: str) -> None:
        self._bus, self._store, self._run = bus, store, run
        self._files: dict[str, dict[int, list[ArchiveFile]]] = {}
        self._ends: dict[str, dict[int, int]] = {}
        self._cache: OrderedDict[str, list[Message]] = OrderedDict()

    def create(self, topics: Sequence[Topic]) -> None:
        """Create nothing."""

    def settings(self, topic: str) -> Topic:
        if self._bus is not None:
            return self._bus.settings(topic)
        (found,) = (t for t in catalogue() if t.name == topic)
        partitions = max(found.partitions, max(self._archived(topic), default=0) + 1)
        return Topic(topic, partitions, found.cleanup, writer=found.writer)

    def partitions(self, topic: str) -> int:
        return self.settings(topic).partitions

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        """Ignore dead letters; refuse any other append."""
        if not topic.endswith(".dead"):
            raise BusError(f"{topic}: this log is read-only")
        return [0] * len(entries)

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        """As `Bus.read`, from the archive below the first kept record. Raises `PositionLost` if
        neither has it.
        """
        kept = {} if self._bus is None else self._bus.begin(topic)
        found: list[Message] = []
        live: dict[int, int] = {}
        for partition, offset in positions.items():
            if partition in kept and offset >= kept[partition]:
                live[partition] = offset
            elif len(found) < records_max:
                found += self._from_archive(topic, partition, offset, records_max - len(found))
        if found or self._bus is None or not live:
            return found
        try:
            return self._bus.read(
                topic, live, records_max=records_max, bytes_max=bytes_max, wait_s=wait_s,
                exact=exact,
            )  # fmt: skip
        except PositionLost:  # truncated just now: those records are archived
            return self.read(topic, live, records_max=records_max, bytes_max=bytes_max)

    def begin(self, topic: str) -> dict[int, int]:
        found = self._known(topic)
        found |= {} if self._bus is None else self._bus.begin(topic)
        for partition, files in self._archived(topic).items():
            found[partition] = min(files[0].first, found.get(partition, files[0].first))
        return found

    def end(self, topic: str) -> dict[int, int]:
        found = self._known(topic) | self._ends.get(topic, {})
        return found if self._bus is None else found | self._bus.end(topic)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        raise BusError(f"{topic}: this log is read-only")

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        """The group's positions of partitions without an archive. In an archived partition the
        truncated records can be read, so their fence need not be known.
        """
        if self._bus is None:
            return {}
        archived = self._archived(topic)
        found = self._bus.committed(group, topic)
        return {partition: at for partition, at in found.items() if partition not in archived}

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        raise BusError(f"{topic}: this log is read-only")

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        raise BusError(f"{topic}: this log is read-only")

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()

    def _known(self, topic: str) -> dict[int, int]:
        return dict.fromkeys(range(self.settings(topic).partitions), 0)

    def _archived(self, topic: str) -> dict[int, list[ArchiveFile]]:
        if topic not in self._files:
            by: dict[int, list[ArchiveFile]] = {}
            if self._store is not None:
                for file in archived_files(self._store, self._run, topic):
                    by.setdefault(file.partition, []).append(file)
                self._ends[topic] = archived_to(self._store, self._run, topic)
            self._files[topic] = by
        return self._files[topic]

    def _from_archive(self, topic: str, partition: int, offset: int, most: int) -> list[Message]:
        found = self._in_file(topic, partition, offset, most)
        if not found and self._bus is not None:  # archived and truncated since the listing
            self._files.pop(topic, None)
            found = self._in_file(topic, partition, offset, most)
        if found:
            return found
        if self._bus is None and offset == self.end(topic).get(partition):
            return []
        raise PositionLost(
            f"{topic} {partition}: offset {offset} is neither in the log nor in the archive"
        )

    def _in_file(self, topic: str, partition: int, offset: int, most: int) -> list[Message]:
        """Messages from the file with this offset; [] if there is none."""
        files = self._archived(topic).get(partition, [])
        below = [file for file in files if file.first <= offset]
        if not below:
            return []
        start = offset - below[-1].first
        found = self._messages(topic, below[-1])[start : start + most]
        assert not found or found[0].offset == offset, f"{below[-1].key} has a hole at {offset}"
        return found

    def _messages(self, topic: str, file: ArchiveFile) -> list[Message]:
        assert self._store is not None
        if file.key not in self._cache:
            self._cache[file.key] = list(messages_of(self._store, topic, file))
        self._cache.move_to_end(file.key)
        while len(self._cache) > FILES_MAX:
            self._cache.popitem(last=False)
        return self._cache[file.key]


RECORDS_MAX = 1024  # of one read


def whole_topic(bus: Bus, store: ObjectStore, run: str, topic: str) -> Iterator[Record]:
    """All records of the topic up to its present end, without void ones, in the order of each
    partition.
    """
    ends = bus.end(topic)
    positions = {partition: Position(0) for partition in ends}
    while True:
        begin = from_begin(bus, topic)
        yield from _archived(store, run, topic, positions, begin)
        for partition, at in begin.items():
            if positions[partition].offset < at.offset:
                positions[partition] = at
        reader = TopicReader(bus, topic, positions)
        try:
            yield from _live(reader, ends)
        except PositionLost:  # truncated meanwhile: those records are archived
            positions = dict(reader.positions)
            continue
        return


def _live(reader: TopicReader, ends: Mapping[int, int]) -> Iterator[Record]:
    while any(at.offset < ends[partition] for partition, at in reader.positions.items()):
        before = dict(reader.positions)
        yield from (one.record for one in reader.poll(0.0, RECORDS_MAX))
        if reader.positions == before:  # the remaining records were compacted away
            return


def _archived(
    store: ObjectStore,
    run: str,
    topic: str,
    start: Mapping[int, Position],
    end: Mapping[int, Position],
) -> Iterator[Record]:
    """Records of archived rows from `start` on and below `end`."""
    if all(start[partition].offset >= end[partition].offset for partition in start):
        return
    for file in archived_files(store, run, topic):
        low, high = start[file.partition].offset, end[file.partition].offset
        if file.first >= high:
            continue
        table = table_from(store, file)
        skipped = min(table.num_rows, max(0, low - file.first))  # rows are contiguous offsets
        wanted = min(table.num_rows, high - file.first) - skipped
        records = records_of(table.slice(skipped, max(0, wanted)))
        yield from (record for record in records if not isinstance(record, Opened))
