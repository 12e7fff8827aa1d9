"""The run's log as a trainer reads it: truncated records are read from the archive, at the same
offsets and byte for byte.

Truncation leaves what a kept checkpoint needs, so the archive is read only if the checkpoints are
lost or damaged, or the log was truncated from outside. It is opened at the first such read.
"""

from collections.abc import Mapping

from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus, Message
from rollstream.errors import PositionLost
from rollstream.streams.wrapper import BusWrapper


class ArchiveBackedBus(BusWrapper):
    """A bus that behaves as the one below it, except that `read` also reaches archived records."""

    def __init__(self, bus: Bus, store: ObjectStore, run: str) -> None:
        super().__init__(bus)
        self._store, self._run = store, run
        self._both: Bus | None = None

    def with_archive(self) -> Bus:
        """Log and archive as one read-only bus; a read raises `PositionLost` where neither has the
        record.
        """
        if self._both is None:
            from rollstream.storage.archive.log import LogWithArchive  # imports pyarrow: seconds, rarely used

            self._both = LogWithArchive(self._below, self._store, self._run)
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
        """Read from the log, or, where a position is truncated, from log and archive together."""
        how = {"records_max": records_max, "bytes_max": bytes_max}
        try:
            return super().read(topic, positions, **how, wait_s=wait_s, exact=exact)
        except PositionLost:
            return self.with_archive().read(topic, positions, **how, exact=exact)
