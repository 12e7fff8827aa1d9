"""The run's log as a trainer reads it: what the log has forgotten is read from the archive, at the
same offsets and byte for byte.

Truncation leaves what a kept checkpoint needs, so this is for a trainer whose checkpoints are gone
or damaged, or whose log somebody else cut. The archive is opened at the first such read.
"""

from collections.abc import Mapping

from storage.objects import ObjectStore
from streams.bus import Bus, Message
from streams.errors import PositionLost
from streams.forwarding import Forwarding


class Recall(Forwarding):
    """A bus as the one below it, but that `read` reaches further back."""

    def __init__(self, bus: Bus, store: ObjectStore, run: str) -> None:
        super().__init__(bus)
        self._store, self._run = store, run
        self._both: Bus | None = None

    def whole(self) -> Bus:
        """Log and archive together, to be read only; `PositionLost` where neither has a record."""
        if self._both is None:
            from storage.archive.whole_log import WholeLog  # pyarrow: seconds, and seldom needed

            self._both = WholeLog(self._below, self._store, self._run)
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
            return super().read(topic, positions, **how, wait_s=wait_s, exact=exact)
        except PositionLost:
            return self.whole().read(topic, positions, **how, exact=exact)
