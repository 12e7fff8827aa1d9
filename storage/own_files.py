"""Files in folders that every user of a machine may write to (`/dev/shm`): only those of this very
user are read. Else another one could make the folder first and feed weights, drafts or a KV cache.
"""

import os
import stat
from pathlib import Path


class ForeignFile(OSError):
    """It is no ordinary file of this user."""


def is_own_file(there: os.stat_result) -> bool:
    """An ordinary file of this user."""
    return stat.S_ISREG(there.st_mode) and there.st_uid == os.getuid()


def open_own(path: Path) -> int:
    """A descriptor for reading; never waits, and follows no link in its last part. `ForeignFile`
    for what is not an ordinary file of this user in a folder of this user, another `OSError` if it
    cannot be had.
    """
    if path.parent.stat().st_uid != os.getuid():
        raise ForeignFile(f"{path.parent} belongs to another user")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not is_own_file(os.fstat(descriptor)):
        os.close(descriptor)
        raise ForeignFile(f"{path} is no ordinary file of this user")
    return descriptor
