"""Temporary folders that outlive no process for long, since copies of a log have gigabytes: each
has a lock, which the kernel frees at its holder's death, and the next process that makes a folder
removes those without one.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# The file that is locked; folders without it are not removed.
MARK = ".holder"
# A folder so young may not be locked yet.
FRESH_S = 60.0


class TemporaryFolder:
    """New and private, at `path`, until `close` or the end of the `with` block."""

    def __init__(self, kind: str) -> None:
        prefix = f"rollstream-{kind}-"
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_abandoned(prefix: str) -> None:
    before_s = time.time() - FRESH_S
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                # Removed by another process meanwhile, or in use.
                with suppress(OSError):
                    _remove_unlocked(Path(entry.path), before_s)


def _remove_unlocked(folder: Path, before_s: float) -> None:
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mtime > before_s:
        return
    lock = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
