"""Locks between processes on one machine, by `flock` on small files that are never removed.

The kernel frees a lock when its holder dies, so a killed process leaves none behind.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from rollstream.errors import StoreError

STRIPES = 256  # lock files per store: keys share them by hash, so their number is bounded
WAIT_S_MAX = 30.0  # a holder only compares and renames one object: after this long it is stopped


class FileLocks:
    """Mutual exclusion per key for all threads and processes that use the same folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, key: str) -> Generator[None]:
        """Hold the lock of `key` inside the block. Raises `StoreError` if its holder does not
        release it in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{xxhash.xxh3_64_intdigest(key.encode()) % STRIPES:02x}"
        # Read-only is enough for flock and lets several users share a store.
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            _wait_for(descriptor, path)
            yield
        finally:
            os.close(descriptor)


def _wait_for(descriptor: int, path: Path) -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    pause_s = 0.0001
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise StoreError(
                    f"lock {path} was held for {WAIT_S_MAX:.0f} s: a process that writes to this "
                    "store is suspended; continue or end it"
                ) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
