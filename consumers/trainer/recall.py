"""The run's log as a trainer reads it: what the log has forgotten is read from the archive, at the
same offsets and byte for byte.

Truncation leaves what a kept checkpoint needs, so this is for a trainer whose checkpoints are gone
or damaged, or whose log somebody else cut. The archive is opened at the first such read.
"""

from collections.abc import Mapping, Sequence

from storage.objects import ObjectStore
from streams.bus import Bus, Entry, GroupReader, Message
from streams.errors import PositionLost
from streams.records import Position
from streams.topics import Topic


class Recall:
    """A bus as the one below it, but that `read` reaches further back."""

    def __init__(self, bus: Bus, store: ObjectStore, run: str) -> None:
        self._bus, self._store, self._run = bus, store, run
        self._both: Bus | None = None

    def whole(self) -> Bus:
        """Log and archive together, to be read only; `PositionLost` where neither has a record."""
        if self._both is None:
            from storage.archive.whole_log import WholeLog  # pyarrow: seconds, and seldom needed

            self._both = WholeLog(self._bus, self._store, self._run)
        return self._both

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
        """From the log, or where that has lost a position from both."""
        how = {"records_max": records_max, "bytes_max": bytes_max}
        try:
            return self._bus.read(topic, positions, **how, wait_s=wait_s, exact=exact)
        except PositionLost:
            return self.whole().read(topic, positions, **how, exact=exact)

    def create(self, topics: Sequence[Topic]) -> None:
        self._bus.create(topics)

    def settings(self, topic: str) -> Topic:
        return self._bus.settings(topic)

    def partitions(self, topic: str) -> int:
        return self._bus.partitions(topic)

    def append(self, topic: str, entries: Sequence[Entry]) -> list[int]:
        return self._bus.append(topic, entries)

    def begin(self, topic: str) -> dict[int, int]:
        return self._bus.begin(topic)

    def end(self, topic: str) -> dict[int, int]:
        return self._bus.end(topic)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        self._bus.commit(group, topic, positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        return self._bus.committed(group, topic)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self._bus.truncate(topic, before)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        return self._bus.join(group, topic, member)

    def close(self) -> None:
        self._bus.close()
