"""A log and its archive as one read-only bus. An offset that is in neither raises `PositionLost`.
Nothing is written, not even to `dead`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING

from rollstream.errors import BusError, ObjectMissing, PositionLost
from rollstream.storage.archive import reading
from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic, catalogue, is_dead_letter_topic

if TYPE_CHECKING:
    from rollstream.storage.archive.originals import FileMessages

FILES_MAX = 6  # archived files kept open: replay reads records of all partitions in turn


class ArchiveBus:
    """`bus` is None without a log, `store` without an archive; `run` is the run's name in the
    archive.
    """

    def __init__(self, bus: Bus | None, store: ObjectStore | None, run: str) -> None:
        self.bus, self.store, self.run = bus, store, run
        self._files: dict[str, dict[int, list[ArchiveFile]]] = {}
        self._ends: dict[str, dict[int, int]] = {}
        self._cache: OrderedDict[str, FileMessages] = OrderedDict()
        self._lock = Lock()

    def archived(self, topic: str, *, relist: bool = False) -> dict[int, list[ArchiveFile]]:
        """Returns the files by partition, ordered by first offset. The store is listed at the first
        call, and with `relist`.
        """
        if relist or topic not in self._files:
            files: dict[int, list[ArchiveFile]] = {}
            if self.store is not None:
                for file in reading.archived_files(self.store, self.run, topic):
                    files.setdefault(file.partition, []).append(file)
            self._files[topic] = files
            self._ends.pop(topic, None)
        return self._files[topic]

    def create(self, topics: Sequence[Topic]) -> None:
        """Does nothing: the topics exist."""

    def settings(self, topic: str) -> Topic:
        """Returns the log's settings; without a log those of the catalogue, with at least as many
        partitions as the archive has.
        """
        if self.bus is not None:
            return self.bus.settings(topic)
        (catalogued,) = (t for t in catalogue() if t.name == topic)
        partitions = max(catalogued.partitions, max(self.archived(topic), default=0) + 1)
        return Topic(topic, partitions, catalogued.cleanup, writer=catalogued.writer)

    def partitions(self, topic: str) -> int:
        return self.settings(topic).partitions

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        """Ignore dead letters; refuse any other append."""
        if not is_dead_letter_topic(topic):
            raise BusError(f"{topic}: this log is read-only")
        # Any reader may write dead letters.
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
        """Reads as `Bus.read`; if a position is below the log's first record, only archived records
        of such partitions. Raises `PositionLost` if the archive lacks the offset too.
        """
        if self.bus is not None:
            try:
                return self.bus.read(
                    topic, positions, records_max=records_max, bytes_max=bytes_max, wait_s=wait_s,
                    exact=exact,
                )  # fmt: skip
            except PositionLost:
                begins = self.bus.begin(topic)
                positions = {p: at for p, at in positions.items() if at < begins[p]} or positions
        messages: list[Message] = []
        for partition, offset in positions.items():
            if len(messages) < records_max:
                messages += self._from_archive(
                    topic, partition, offset, records_max - len(messages)
                )
        return messages

    def begin(self, topic: str) -> dict[int, int]:
        """Returns the first offset per partition, archived ones included."""
        begins = self._known(topic) if self.bus is None else self.bus.begin(topic)
        for partition, files in self.archived(topic).items():
            begins[partition] = min(files[0].first, begins.get(partition, files[0].first))
        return begins

    def end(self, topic: str) -> dict[int, int]:
        """Returns the log's ends; without a log the archive's ends when it was last listed."""
        if self.bus is not None:
            return self.bus.end(topic)
        files = self.archived(topic)
        if topic not in self._ends and self.store is not None:
            store = self.store
            self._ends[topic] = {
                partition: reading.file_end(store, listed[-1]).last + 1
                for partition, listed in files.items()
            }
        return self._known(topic) | self._ends.get(topic, {})

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        raise BusError(f"{topic}: this log is read-only")

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        """Returns the group's positions, without those of archived partitions."""
        if self.bus is None:
            return {}
        # A truncation point is committed with its fence; in an archived partition readers read the
        # truncated records instead and compute the fence.
        archived = self.archived(topic)
        positions = self.bus.committed(group, topic)
        return {partition: at for partition, at in positions.items() if partition not in archived}

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        raise BusError(f"{topic}: this log is read-only")

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        raise BusError(f"{topic}: this log is read-only")

    def close(self) -> None:
        if self.bus is not None:
            self.bus.close()

    def _known(self, topic: str) -> dict[int, int]:
        return dict.fromkeys(range(self.settings(topic).partitions), 0)

    def _from_archive(
        self, topic: str, partition: int, offset: int, records_max: int
    ) -> list[Message]:
        messages: list[Message] = []
        changed = self.bus is not None
        try:
            messages = self._in_file(topic, partition, offset, records_max)
        except ObjectMissing:
            changed = True
        if not messages and changed:  # archived and truncated, or merged, since the listing
            self.archived(topic, relist=True)
            messages = self._in_file(topic, partition, offset, records_max)
        if messages:
            return messages
        if self.bus is None and offset == self.end(topic).get(partition):
            return []
        raise PositionLost(
            f"{topic} {partition}: offset {offset} is neither in the log nor in the archive"
        )

    def _in_file(self, topic: str, partition: int, offset: int, records_max: int) -> list[Message]:
        files = self.archived(topic).get(partition, [])
        below = bisect_right(files, offset, key=attrgetter("first"))
        if not below:
            return []
        file = files[below - 1]
        with self._lock:
            messages = self._messages(topic, file).since(offset, records_max)
        if messages and messages[0].offset != offset:
            raise reading.damaged_file(file, f"it has a hole at offset {offset}")
        return messages

    def _messages(self, topic: str, file: ArchiveFile) -> FileMessages:
        if file.key not in self._cache:
            from rollstream.storage.archive.originals import FileMessages

            assert self.store is not None
            self._cache[file.key] = FileMessages(self.store, topic, file)
        self._cache.move_to_end(file.key)
        while len(self._cache) > FILES_MAX:
            self._cache.popitem(last=False)
        return self._cache[file.key]
