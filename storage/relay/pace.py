"""Limits how fast a process sends, for links that others use too."""

import threading
import time
from collections.abc import Callable

PIECE_BYTES = 256 << 10  # per send call; at 25 MB/s ten of them take a tenth of a second
BURST_S = 0.02


class BandwidthLimiter:
    """At most `bytes_per_s` (0: no limit) over all threads that share it."""

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, count: int) -> None:
        """Return when `count` more bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            self._free_s = max(self._free_s, now - BURST_S) + count / self._bytes_per_s
            wait_s = self._free_s - now
        if wait_s > 0:
            self._sleep(wait_s)
