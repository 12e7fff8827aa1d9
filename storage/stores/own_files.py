"""Opens files in folders that every user of a machine may write to (`/dev/shm`): only files of this
user are read. Otherwise another user could create the folder first and supply weights, drafts or a
KV cache.
"""

import os
import stat
from pathlib import Path


class ForeignFile(OSError):
    """Not an ordinary file of this user."""


def is_own_file(there: os.stat_result) -> bool:
    """Whether it is an ordinary file of this user."""
    return stat.S_ISREG(there.st_mode) and there.st_uid == os.getuid()


def open_own(path: Path) -> int:
    """A descriptor for reading. Never waits, and follows no link in the last part of the path.
    Raises `ForeignFile` unless it is an ordinary file of this user in a folder of this user,
    another `OSError` if it cannot be opened.
    """
    if path.parent.stat().st_uid != os.getuid():
        raise ForeignFile(f"{path.parent} belongs to another user")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not is_own_file(os.fstat(descriptor)):
        os.close(descriptor)
        raise ForeignFile(f"{path} is not an ordinary file of this user")
    return descriptor
