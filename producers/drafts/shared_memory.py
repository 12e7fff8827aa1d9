"""The shared-memory file that holds a node's history: naming, creating, mapping and removing it.

The folder's name contains user, run and node, so no run uses the file of another. There are two
locks, which the kernel frees when their holder dies: the folder's lock is held by the one process
that writes, the file's lock is shared by all rollouts that have the file mapped. A process that
gets the folder's lock may write; one that gets the file's lock exclusively knows that no other
process uses the file.
"""

import contextlib
import fcntl
import mmap
import os
from array import array
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rollstream.producers.drafts.memory import HEADER_BYTES, WRITER_WORD, HistoryLayout, HistoryMemory, parse_layout
from rollstream.storage.stores.own_files import is_own_file
from rollstream.errors import StoreError

SHARED_MEMORY_FOLDER = Path("/dev/shm")
HISTORY_FILE, PARTIAL_FILE = "history", "history.partial"


def segment_folder(run: str, folder: Path, node: str) -> Path:
    """The folder of a run's history on this node: in `/dev/shm`, or in the run's folder where the
    node has no `/dev/shm`.
    """
    named = f"{run}\n{folder.absolute()}\n{node}"
    digest = xxhash.xxh3_128_hexdigest(named.encode())[:12]
    base = SHARED_MEMORY_FOLDER if SHARED_MEMORY_FOLDER.is_dir() else folder
    return base / f"rollstream-{os.getuid()}-{digest}-drafts"


@dataclass(frozen=True, slots=True)
class HistorySegment:
    """A mapped file; while it is held and not closed, no process removes it."""

    memory: HistoryMemory
    inode: int
    _descriptor: int

    def close(self) -> None:
        """Release the lock; the mapping stays readable for existing references to it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping has a copy of the descriptor
        os.close(self._descriptor)


def map_segment(path: Path, writes: bool = False, holds: bool = True) -> HistorySegment | None:
    """Map the segment of this name. Returns None where there is none or it is being removed, and,
    without `writes`, where its writer is dead: the next writer may remove it. Without `holds` the
    segment may be removed while it is mapped.
    """
    try:
        descriptor = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_NOFOLLOW)
    except OSError:  # not there yet, or of another user
        return None
    try:
        found = _map_descriptor(descriptor, writes, holds)
    except OSError:  # locked by the process that removes it
        found = None
    if found is None:
        os.close(descriptor)
    return found


def make_segment(folder: Path, layout: HistoryLayout) -> HistorySegment:
    """Create a segment, replacing an existing one. Raises `StoreError` when there is no room. The
    caller holds the folder's lock.
    """
    partial, size = folder / PARTIAL_FILE, layout.bytes
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:  # a full file system is an error here, and a SIGBUS in the mapped memory
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, array("q", layout.words()).tobytes(), 0)
            found = _map_descriptor(descriptor, writes=True, holds=True)
            assert found is not None, "the segment was just made"
            partial.rename(folder / HISTORY_FILE)
        except BaseException:
            partial.unlink(missing_ok=True)
            os.close(descriptor)
            raise
    except OSError as error:
        raise StoreError(
            f"no room for a history of {size} bytes in {folder}: {error.strerror} "
            "(rollouts.drafts_tokens)"
        ) from error
    return found


def lock_folder(folder: Path) -> int | None:
    """Lock the folder, created if needed, and return its descriptor; None while another process has
    the lock. Raises `StoreError` for a folder that cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # its last user removed it just now
        return None
    except OSError as error:
        raise StoreError(f"folder {folder} cannot be used: {error.strerror}") from error
    here = os.fstat(descriptor)
    if here.st_uid != os.getuid():
        os.close(descriptor)
        raise StoreError(f"folder {folder} belongs to another user")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == here.st_ino:
            return descriptor
    except OSError:  # taken, or removed meanwhile
        pass
    os.close(descriptor)
    return None


def is_held(path: Path) -> bool:
    """Whether any process, this one included, holds the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_segment(folder: Path) -> bool:
    """Remove the folder unless a process uses its file. The caller holds the folder's lock."""
    if is_held(folder / HISTORY_FILE):
        return False
    with contextlib.suppress(OSError):  # a folder with a foreign file is kept
        for name in (HISTORY_FILE, PARTIAL_FILE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    return True


def sweep_dead_segments(folder: Path) -> None:
    """Remove the folders beside this one that killed runs of this user left: no process uses them,
    and a restarted run would create its folder again.
    """
    for other in folder.parent.glob(f"rollstream-{os.getuid()}-*-drafts"):
        with contextlib.suppress(StoreError):
            lock = None if other == folder else lock_folder(other)
            if lock is not None:
                remove_segment(other)
                os.close(lock)


def _map_descriptor(descriptor: int, writes: bool, holds: bool) -> HistorySegment | None:
    there = os.fstat(descriptor)
    header = array("q", os.pread(descriptor, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0"))
    layout = parse_layout(header.tolist())
    if layout is None or not is_own_file(there) or there.st_size != layout.bytes:
        return None
    if not (writes or _is_alive(header[WRITER_WORD])):
        return None
    if holds:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
    mapped = memoryview(mmap.mmap(descriptor, layout.bytes, access=access))
    return HistorySegment(HistoryMemory(layout, mapped), there.st_ino, descriptor)


def _is_alive(pid: int) -> bool:
    if not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
