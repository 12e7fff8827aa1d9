"""A node's folder of handed-over KV: bounded, oldest out first, whoever writes and dies.

A file is written under a partial name, which its writer holds locked, and renamed when it is whole.
The kernel frees the lock when the writer dies, so the next one that writes removes what it left.
Room is made, and reserved, under the folder's own short lock; whoever cannot have it at once hands
nothing over (`StoreError`), for nobody waits here.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from storage.objects import Data
from streams.errors import StoreError

BYTES_MAX = 4 << 30  # of a node and run; and never more than half of what is free there
ENDING, PARTIAL, LOCK = ".kv", ".partial", "writing"
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.001  # whoever has it only lists the folder


@dataclass(frozen=True, slots=True)
class Shelf:
    """What may lie in `folder`, which whoever uses it has made (`place.py`)."""

    folder: Path
    bytes_max: int = BYTES_MAX

    def path(self, trajectory: str) -> Path:
        """Of the newest KV of it: its name may hold anything."""
        return self.folder / f"{xxhash.xxh3_128_hexdigest(trajectory.encode())}{ENDING}"

    def put(self, path: Path, parts: Sequence[Data]) -> None:
        """In the place of what was there; `StoreError` says why it is not, and nothing is then."""
        partial = path.with_name(f"{path.stem}.{os.getpid()}{PARTIAL}")
        try:
            descriptor = self._reserve(partial, sum(len(part) for part in parts))
            try:
                for part in parts:
                    _write(descriptor, part)
                os.rename(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"no KV in {path}: {error.strerror}") from error

    def _reserve(self, partial: Path, size: int) -> int:
        with self._alone():
            self._drop_dead()
            self._make_room(size)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            descriptor = os.open(partial, flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, size)
        return descriptor

    def _make_room(self, size: int) -> None:
        """Remove the oldest until it fits; `StoreError` where it cannot."""
        there = sorted(_listed(self.folder), key=lambda entry: entry[0])
        used = sum(entry[1] for entry in there)
        system = os.statvfs(self.folder)
        limit = min(self.bytes_max, used + system.f_bavail * system.f_frsize // 2)
        if size > limit:
            raise StoreError(f"no KV of {size} bytes in {self.folder}: it may hold {limit}")
        for _, old, path in there:
            if used + size <= limit:
                return
            if path.suffix == ENDING:
                path.unlink(missing_ok=True)
                used -= old
        if used + size > limit:
            raise StoreError(f"no KV of {size} bytes in {self.folder}: others are writing")

    def _drop_dead(self) -> None:
        """Partial files that nobody holds."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            for _ in range(_LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOCK_PAUSE_S)
            else:
                raise StoreError(f"no KV in {self.folder}: others are busy there")
            yield
        finally:
            os.close(lock)


def _listed(folder: Path) -> list[tuple[int, int, Path]]:
    """Age, size and path of what lies there of ours."""
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        if path.suffix in (ENDING, PARTIAL):
            with contextlib.suppress(FileNotFoundError):  # imported this moment
                there = path.lstat()
                if stat.S_ISREG(there.st_mode):
                    found.append((there.st_mtime_ns, there.st_size, path))
    return found


def _write(descriptor: int, part: Data) -> None:
    """All of it: one call writes 2 GiB at most."""
    rest = memoryview(part)
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest) :]
