"""How long a process has worked or slept, whatever else the machine does: one that waits for a core
is not late.
"""

import os
import time
from tempfile import TemporaryFile
from typing import IO

import psutil

# A process is late in any case after so many times its limit by the clock.
BUSY_MAX = 10
_WAITS_FOR_MACHINE = {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP}


def output_file() -> IO[bytes]:
    """A file without a name."""
    try:
        return TemporaryFile()
    # No room: the output is lost, and another check names the place that lacks room.
    except OSError:
        return open(os.devnull, "w+b")


class ProcessTime:
    """Time on a core, and time asleep, between frequent calls of `is_over`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._began_s = self._seen_s = time.monotonic()
        self._used_s, self._slept_s = self._cpu_s(), 0.0
        self._first_s = self._used_s

    def is_over(self, limit_s: float, sleep_s: float | None = None) -> bool:
        """The process had more than this time, or slept longer than `sleep_s`."""
        now = time.monotonic()
        elapsed_s, self._seen_s = now - self._seen_s, now
        try:
            used_s, status = self._cpu_s(), self._process.status()
        # It has ended, which the reader of its pipe sees.
        except psutil.Error:
            return False
        if status not in _WAITS_FOR_MACHINE:
            self._slept_s += max(0.0, elapsed_s - (used_s - self._used_s))
        self._used_s = used_s
        if sleep_s is not None and self._slept_s > sleep_s:
            return True
        spent_s = used_s - self._first_s + self._slept_s
        return spent_s > limit_s or now - self._began_s > BUSY_MAX * limit_s

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system
