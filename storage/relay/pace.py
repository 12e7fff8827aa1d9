"""How fast a process sends: a bound for links that others need too."""

import threading
import time
from collections.abc import Callable

PIECE_BYTES = 256 << 10  # sent at once; a tenth of a second of 25 MB/s holds ten of them
BURST_S = 0.02


class Pace:
    """At most `bytes_per_s` (0: no bound) over all threads that share it."""

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
        """Returns when `count` more bytes may leave."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            self._free_s = max(self._free_s, now - BURST_S) + count / self._bytes_per_s
            wait_s = self._free_s - now
        if wait_s > 0:
            self._sleep(wait_s)
