"""Objects in a folder of one machine (`file:PATH`; docs/explanation/storage.md has the
interleavings).
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import xxhash

from rollstream.errors import ObjectExists, ObjectMissing, OutsideRun, StoreError, SwapLost
from rollstream.os_failures import explain_os_error
from rollstream.storage.stores.base import (
    Data,
    ListedObject,
    ObjectStat,
    check_key,
    check_prefix,
    content_hash,
    is_key,
)

STRIPES = 256  # lock files per store: keys share them by hash, so their number is bounded
WAIT_S_MAX = 30.0  # comparing and renaming take far less: a holder for so long is suspended


class FileLocks:
    """Locks keys among threads and processes by `flock` on small files, which stay. The kernel
    frees a lock when its holder dies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, key: str) -> Generator[None]:
        """Raises `StoreError` if another holder keeps it for more than `WAIT_S_MAX`."""
        _make_own_folder(self._folder)
        path = self._folder / f"{xxhash.xxh3_64_intdigest(key.encode()) % STRIPES:02x}"
        # Read-only is enough for flock and lets several users share a store. A store of another
        # user may have a link or pipe of this name.
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        try:
            _wait_for(descriptor, path)
            yield
        finally:
            os.close(descriptor)


def _make_own_folder(folder: Path) -> None:
    # Files would be made where a link of another user leads.
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link, which no store makes: remove it")
    folder.mkdir(parents=True, exist_ok=True)


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


_NO_OBJECT = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}  # of `link` with a file of one's own
_KEY_IN_THE_WAY = "a file or folder is in the way: a key cannot be the folder of another key"


@contextmanager
def translate_os_errors(action: str, path: Path) -> Generator[None]:
    """Turn an `OSError` into a `StoreError` with advice; with the action `read`, a missing object
    raises `ObjectMissing`.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if action == "read" and error.errno in _NO_OBJECT:
            raise ObjectMissing(f"no object {path}") from error
        if error.errno in _IN_THE_WAY:
            advice = f"{error.strerror}; {_KEY_IN_THE_WAY}"
        else:
            advice = explain_os_error(error)
        raise StoreError(f"cannot {action} {path}: {advice}") from error


_TEMPORARY = re.compile(r"[0-9a-f]{32}")  # the name of a temporary file
LEFTOVER_AGE_S = 3600.0  # no write of one object takes this long: its writer was killed
PLACE_ATTEMPTS_MAX = 100  # an attempt fails if a delete removes the key's folder at that moment


class FileStore:
    """Threads and processes of one machine may share the folder. Acknowledged writes survive `kill
    -9`; with sync `full` power loss too. The etag is the hash of the content, so `stat` reads the
    object.
    """

    def __init__(self, root: str | Path, sync: Literal["normal", "full"] = "normal") -> None:
        self._root = Path(os.path.abspath(root))
        # No key has a `~`.
        self._temporary = self._root / "~writing"
        self._locks = FileLocks(self._root / "~locks")
        self._sync = sync == "full"
        with translate_os_errors("open", self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self._temporary, time.time() - LEFTOVER_AGE_S)

    def put(self, key: str, data: Data) -> str:
        target = self.path(key)
        with (
            translate_os_errors("write", target),
            self._temporary_file(data) as source,
            self._locks.hold(key),
        ):
            self._take_name(os.replace, source, target)
        return content_hash(data)

    def create(self, key: str, data: Data) -> str:
        return self._create(key, data, 0o666)

    def create_private(self, key: str, data: Data) -> str:
        """Creates the object in a file and a folder that no other user of the machine may read."""
        folder = self.path(key).parent
        with translate_os_errors("create", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        return self._create(key, data, 0o600)

    def _create(self, key: str, data: Data, mode: int) -> str:
        target = self.path(key)
        with translate_os_errors("create", target), self._temporary_file(data, mode) as source:
            try:
                # A hard link: the kernel picks the one winner.
                self._take_name(os.link, source, target)
            except FileExistsError:
                raise ObjectExists(f"object {key} is already in {self._root}") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise StoreError(
                    f"cannot create {target}: {error.strerror}; the file system of {self._root} "
                    "has no hard links (exFAT, FAT, some of FUSE): choose a folder on another one"
                ) from error
        return content_hash(data)

    def swap(self, key: str, data: Data, etag: str) -> str:
        target = self.path(key)
        with (
            translate_os_errors("swap", target),
            self._temporary_file(data) as source,
            self._locks.hold(key),
        ):
            try:
                # Under the key's lock, so that no other write comes between comparison and
                # renaming.
                present = self.stat(key).etag
            except ObjectMissing:
                present = "absent"
            if present != etag:
                raise SwapLost(f"object {key} in {self._root} is {present}, not {etag}")
            self._take_name(os.replace, source, target)
        return content_hash(data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        assert 0 <= start <= (start if end is None else end), (key, start, end)
        path = self.path(key)
        with translate_os_errors("read", path), open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OutsideRun(f"{path} is no regular file (a pipe or device): not read")
            size = status.st_size
            file.seek(start)
            return file.read(max(0, size - start if end is None else min(end, size) - start))

    def stat(self, key: str) -> ObjectStat:
        content, etag = self.read(key)
        return ObjectStat(key, len(content), etag)

    def read(self, key: str) -> tuple[bytes, str]:
        content = self.get(key)
        return content, content_hash(content)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        check_prefix(prefix)
        folder = self._root / prefix.rpartition("/")[0]
        with translate_os_errors("list", folder):
            entries = [entry for entry in self._walk(folder) if entry.key.startswith(prefix)]
        return iter(sorted(entries, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        path = self.path(key)
        with translate_os_errors("delete", path), self._locks.hold(key):
            with suppress(NotADirectoryError, IsADirectoryError):
                path.unlink(missing_ok=True)
            self._remove_empty(path.parent)

    def delete_all(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def remove_if_empty(self) -> None:
        """Removes an empty store's folder; another program's file in it stays, with the folder."""
        if next(self._walk(self._root), None) is None:
            for folder in (self._temporary, self._root / "~locks"):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # a file of another program
                self._root.rmdir()

    def path(self, key: str) -> Path:
        """Returns the path of the object's file, which callers may read but never write to."""
        return self._root / check_key(key)

    @contextmanager
    def _temporary_file(self, data: Data, mode: int = 0o666) -> Generator[Path]:
        path = self._temporary / uuid.uuid4().hex
        _make_own_folder(self._temporary)
        try:
            opener = partial(os.open, mode=mode)
            with open(path, "xb", buffering=0, opener=opener) as file:
                view = memoryview(data).cast("B")
                while view:
                    view = view[file.write(view) :]
                if self._sync:
                    os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _take_name(self, step: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        for attempt in range(PLACE_ATTEMPTS_MAX):
            try:
                step(source, target)
                break
            except FileNotFoundError:
                if attempt == PLACE_ATTEMPTS_MAX - 1 or not source.exists():
                    raise
                # A folder that is made or removed meanwhile raises either error; the loop retries.
                with suppress(FileNotFoundError, FileExistsError):
                    target.parent.mkdir(parents=True, exist_ok=True)
        if self._sync:
            self._sync_folders(target.parent)

    def _sync_folders(self, folder: Path) -> None:
        # A file's name is durable once its folder is synced, and a new folder's once its parent is.
        while folder.is_relative_to(self._root):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            folder = folder.parent

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):  # not empty, or removed by another process: both are fine
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _walk(self, folder: Path) -> Iterator[ListedObject]:
        # A link to a folder counts as one: a user may have moved `archive` to a larger disk, and
        # `list("")` must list what `list("archive/")` does. A link to a folder that contains it is
        # left out.
        chains = {str(folder): (os.path.realpath(folder),)}
        for path, folders, files in os.walk(str(folder), onerror=_unless_missing, followlinks=True):
            chain = chains.pop(path)
            for name in files:
                file = Path(path, name)
                key = file.relative_to(self._root).as_posix()
                with suppress(FileNotFoundError):  # deleted during the walk
                    if is_key(key):
                        yield ListedObject(key, file.stat().st_size)
            inner = {name: _real_folder(os.path.join(path, name), chain[-1]) for name in folders}
            folders[:] = [n for n, real in inner.items() if "~" not in n and real not in chain]
            chains |= {os.path.join(path, name): (*chain, inner[name]) for name in folders}


def _open_at_once(path: str, flags: int) -> int:
    # Opening a pipe waits for its other end.
    return os.open(path, flags | os.O_NONBLOCK)


def _real_folder(path: str, parent: str) -> str:
    return os.path.realpath(path) if os.path.islink(path) else f"{parent}/{os.path.basename(path)}"


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _remove_leftovers(folder: Path, before_s: float) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        # A link in place of the folder would lead to files of another user.
        if folder.is_symlink():
            return
        for path in folder.iterdir():
            with suppress(FileNotFoundError, PermissionError):
                status = path.lstat()
                # Writers draw such names; older files are those of killed ones.
                is_partial = _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(status.st_mode)
                if is_partial and status.st_mtime < before_s:
                    path.unlink()


class ForeignFile(OSError):
    """Not an ordinary file of this user in a folder of this user."""


def is_own_file(there: os.stat_result) -> bool:
    return stat.S_ISREG(there.st_mode) and there.st_uid == os.getuid()


def open_own(path: Path) -> int:
    """Opens a file for reading, without waiting, and without following a link in the path's last
    part. Raises `ForeignFile`, and another `OSError` if the file cannot be opened.
    """
    # Where every user may write (`/dev/shm`), another one could create such a folder first and
    # supply weights, drafts or a KV cache.
    if path.parent.stat().st_uid != os.getuid():
        raise ForeignFile(f"{path.parent} belongs to another user")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not is_own_file(os.fstat(descriptor)):
        os.close(descriptor)
        raise ForeignFile(f"{path} is not an ordinary file of this user")
    return descriptor
