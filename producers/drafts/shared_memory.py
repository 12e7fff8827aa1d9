"""A mapped file in shared memory (a segment). Its header is checked once; no value read later can
cause an access outside of the memory. The writer holds the lock of the file's folder; all rollouts
that map the file share the file's.
"""

import contextlib
import fcntl
import mmap
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from rollstream.errors import StoreError
from rollstream.os_failures import explain_os_error
from rollstream.storage.stores.file import is_own_file

NGRAM_LENGTHS = (3, 4, 5, 6, 7)  # newest tokens by which a place in the history is looked up
# Most drafted tokens per token of the matched n-gram: drafts after a short match fail sooner.
DRAFTED_PER_MATCHED = 5
SEQUENCE_END = 2**32 - 1  # mark after each sequence; not a token

PROBES = 8  # neighbouring slots of the table that may hold a key
ENTRY_BYTES = 20  # key 8, place 8, rank 4

MAGIC = int.from_bytes(b"rhymes/1", "little")
HEADER_BYTES = 256
HEADER_WORDS = HEADER_BYTES // 8
_MAGIC, _TOKENS_MAX, _REACH, _COUNT, _LENGTHS = range(5)  # lengths fill up to 16 words
WRITER_WORD, HEAD_WORD, INSERTED_WORD = HEADER_WORDS - 3, HEADER_WORDS - 2, HEADER_WORDS - 1
"""Indices of the header's words that change: the writer's process id, the place of the next token
(`HistoryMemory`), the number of tokens inserted.
"""
HISTORY_TOKENS_MIN, HISTORY_TOKENS_MAX = 16, 1 << 31
NGRAM_LENGTH_MAX = 64


@dataclass(frozen=True, slots=True)
class HistoryLayout:
    """The sizes of a history's arrays; a draft has at most `reach` tokens per matched token."""

    tokens_max: int
    lengths: tuple[int, ...] = NGRAM_LENGTHS
    reach: int = DRAFTED_PER_MATCHED

    @property
    def slots(self) -> int:
        # One for each token and length, and a quarter more, so that a key is soon found.
        entries = len(self.lengths) * self.tokens_max * 5 // 4
        # `PROBES` more at the end, so that probing need not wrap around.
        return (1 << max(4, (entries - 1).bit_length())) + PROBES

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + ENTRY_BYTES * self.slots + 4 * self.tokens_max

    def words(self) -> list[int]:
        words = [0] * HEADER_WORDS
        words[_MAGIC], words[_TOKENS_MAX], words[_REACH] = MAGIC, self.tokens_max, self.reach
        words[_COUNT] = len(self.lengths)
        words[_LENGTHS : _LENGTHS + len(self.lengths)] = self.lengths
        # So the lowest valid place, `tokens_max` before the next one, is never negative.
        words[HEAD_WORD] = self.tokens_max
        return words


def parse_layout(words: Sequence[int]) -> HistoryLayout | None:
    """Returns the layout in a header; None if the words are no valid header."""
    count = words[_COUNT]
    if words[_MAGIC] != MAGIC or not 0 < count <= 16:
        return None
    lengths = tuple(words[_LENGTHS : _LENGTHS + count])
    sizes_fit = (
        HISTORY_TOKENS_MIN <= words[_TOKENS_MAX] <= HISTORY_TOKENS_MAX and 0 < words[_REACH] <= 1024
    )
    if not sizes_fit or list(lengths) != sorted(set(lengths)):
        return None
    if lengths[0] < 1 or lengths[-1] > NGRAM_LENGTH_MAX:
        return None
    return HistoryLayout(words[_TOKENS_MAX], lengths, words[_REACH])


class HistoryMemory:
    """Places number all tokens ever stored; a place's token is at index place modulo `tokens_max`.
    The table maps an n-gram's hash (`index.py`) to the place behind its best occurrence.
    """

    def __init__(self, layout: HistoryLayout, buffer: memoryview) -> None:
        assert len(buffer) == layout.bytes, "a buffer of another layout"
        self.layout = layout
        ends = [HEADER_BYTES]
        for size in (8 * layout.slots, 8 * layout.slots, 4 * layout.slots, 4 * layout.tokens_max):
            ends.append(ends[-1] + size)
        # Memoryviews: an item is read twice as fast as from a numpy array.
        self.words = buffer[: ends[0]].cast("q")
        self.keys = buffer[ends[0] : ends[1]].cast("Q")
        self.places = buffer[ends[1] : ends[2]].cast("q")
        self.ranks = buffer[ends[2] : ends[3]]  # bytes; only writers read them
        self.tokens = buffer[ends[3] : ends[4]].cast("I")


def allocate_memory(layout: HistoryLayout) -> HistoryMemory:
    memory = HistoryMemory(layout, np.zeros(layout.bytes, np.uint8).data)
    memory.words[:] = memoryview(array("q", layout.words()))
    return memory


SHARED_MEMORY_FOLDER = Path("/dev/shm")
HISTORY_FILE, PARTIAL_FILE = "history", "history.partial"


def segment_folder(run: str, folder: Path, node: str) -> Path:
    """Returns a folder in `/dev/shm`, or, if the node has none, in the run's `folder`."""
    # No run uses the file of another.
    identity = f"{run}\n{folder.absolute()}\n{node}"
    digest = xxhash.xxh3_128_hexdigest(identity.encode())[:12]
    base = SHARED_MEMORY_FOLDER if SHARED_MEMORY_FOLDER.is_dir() else folder
    return base / f"rollstream-{os.getuid()}-{digest}-drafts"


@dataclass(frozen=True, slots=True)
class HistorySegment:
    """With `holds` this process shares the file's lock until `close`, so no process removes it."""

    memory: HistoryMemory
    inode: int
    _descriptor: int

    def close(self) -> None:
        # Closing alone would keep the lock: the mapping has a copy of the descriptor.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def map_segment(path: Path, writes: bool = False, holds: bool = True) -> HistorySegment | None:
    """Map the segment; None if there is no valid one of this user or it is being removed, and,
    without `writes`, if its writer is dead: the next writer may remove it.
    """
    try:
        descriptor = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_NOFOLLOW)
    except OSError:  # not there yet, or of another user
        return None
    try:
        segment = _map_descriptor(descriptor, writes, holds)
    except OSError:  # locked by the process that removes it
        segment = None
    if segment is None:
        os.close(descriptor)
    return segment


def make_segment(folder: Path, layout: HistoryLayout) -> HistorySegment:
    """Replaces an existing segment, which stays mapped where it is. Raises `StoreError` if there is
    no room. The caller holds the folder's lock.
    """
    partial, size = folder / PARTIAL_FILE, layout.bytes
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:  # a full file system is an error here; in the mapped memory it would be a SIGBUS
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, array("q", layout.words()).tobytes(), 0)
            segment = _map_descriptor(descriptor, writes=True, holds=True)
            assert segment is not None, "the segment was just made"
            partial.rename(folder / HISTORY_FILE)
        except BaseException:
            partial.unlink(missing_ok=True)
            os.close(descriptor)
            raise
    except OSError as error:
        raise StoreError(
            f"no room for a history of {size} bytes in {folder}: {explain_os_error(error)} "
            "(rollouts.drafts_tokens)"
        ) from error
    return segment


def lock_folder(folder: Path) -> int | None:
    """Returns the locked folder's descriptor; None while another process has the lock. Raises
    `StoreError` for a folder that cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # its last user removed it just now
        return None
    except OSError as error:
        raise StoreError(f"folder {folder} cannot be used: {explain_os_error(error)}") from error
    folder_stat = os.fstat(descriptor)
    if folder_stat.st_uid != os.getuid():
        os.close(descriptor)
        raise StoreError(f"folder {folder} belongs to another user")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == folder_stat.st_ino:
            return descriptor
    except OSError:  # taken, or removed meanwhile
        pass
    os.close(descriptor)
    return None


def is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Succeeds if none does; closing the file releases it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_segment(folder: Path) -> bool:
    """Remove the segment; False if a process shares the file's lock. The caller holds the folder's
    lock.
    """
    if is_held(folder / HISTORY_FILE):
        return False
    with contextlib.suppress(OSError):  # a folder with a foreign file is kept
        for name in (HISTORY_FILE, PARTIAL_FILE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    return True


def sweep_dead_segments(folder: Path) -> None:
    # Killed runs left them; a run that restarts creates its folder again.
    for other in folder.parent.glob(f"rollstream-{os.getuid()}-*-drafts"):
        with contextlib.suppress(StoreError):
            lock = None if other == folder else lock_folder(other)
            if lock is not None:
                remove_segment(other)
                os.close(lock)


def _map_descriptor(descriptor: int, writes: bool, holds: bool) -> HistorySegment | None:
    file_stat = os.fstat(descriptor)
    header = array("q", os.pread(descriptor, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0"))
    layout = parse_layout(header.tolist())
    if layout is None or not is_own_file(file_stat) or file_stat.st_size != layout.bytes:
        return None
    if not (writes or _is_alive(header[WRITER_WORD])):
        return None
    if holds:
        # Raises `OSError` if the process that removes the file has it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
    mapped = memoryview(mmap.mmap(descriptor, layout.bytes, access=access))
    return HistorySegment(HistoryMemory(layout, mapped), file_stat.st_ino, descriptor)


def _is_alive(pid: int) -> bool:
    if not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and is another user's
        pass
    return True
