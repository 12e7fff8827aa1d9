"""Where handed-over KV of a run lies on a node, and who lives there.

In memory, in a folder whose name says user, run and node, as the node's history of drafts. Every
rollout that may write or read there holds the folder's lock together with the others; the kernel
frees it when it dies. Who can have it alone knows that nobody else lives: it empties the folder, as
the first to come (what a killed run left) and as the last to leave.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from producers.engines.drafts.segment import lock_folder, segment_folder
from producers.engines.vllm_engine.handover.shelf import ENDING, LOCK, PARTIAL
from streams.errors import StoreError

SUFFIX = "-kv"
_TRIES, _PAUSE_S = 200, 0.005  # whoever has it alone is emptying the folder


def handover_folder(run: str, folder: Path, node: str) -> Path:
    """Beside the drafts of the same run and node."""
    drafts = segment_folder(run, folder, node)
    return drafts.with_name(drafts.name.removesuffix("-drafts") + SUFFIX)


class Place:
    """This process's right to the folder, until `leave`; `StoreError` where it cannot be had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        for _ in range(_TRIES):
            self._lock = _alone(folder)
            if self._lock is None:
                self._lock = _shared(folder)
            if self._lock is not None:
                break
            time.sleep(_PAUSE_S)
        else:
            raise StoreError(f"folder {folder} is locked by another process that does not let go")
        _sweep(folder)

    def leave(self) -> None:
        """The last one takes everything with it."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):  # others live
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(self.folder)
            self.folder.rmdir()
        os.close(lock)


def _alone(folder: Path) -> int | None:
    """Nobody else lives here: what lies here is nobody's."""
    lock = lock_folder(folder)
    if lock is None:
        return None
    _empty(folder)
    return _with_others(lock, folder)  # another one may come in between


def _shared(folder: Path) -> int | None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    return _with_others(lock, folder)


def _with_others(lock: int, folder: Path) -> int | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == os.fstat(lock).st_ino:
            return lock
    except OSError:  # being emptied, or removed meanwhile
        pass
    os.close(lock)
    return None


def _empty(folder: Path) -> None:
    """Of what is ours; the caller holds the folder alone."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in (ENDING, PARTIAL) or path.name == LOCK:
                path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what killed runs of this user left beside this folder."""
    for other in folder.parent.glob(f"rollstream-{os.getuid()}-*{SUFFIX}"):
        with contextlib.suppress(StoreError, OSError):
            lock = None if other == folder else lock_folder(other)
            if lock is not None:
                _empty(other)
                other.rmdir()
                os.close(lock)
