"""Opens a store, perhaps another user's, for reading: nothing is made or cleaned up, a write raises
`ReadOnly`, and no link out of a folder is followed.
"""

from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import NoReturn

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ReadOnly
from rollstream.storage.stores.base import (
    Data,
    ListedObject,
    ObjectStat,
    ObjectStore,
    check_key,
    check_prefix,
    content_hash,
    is_key,
)
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.file import translate_os_errors


def open_store_for_reading(
    url: str, folder: ContainedFolder | None, deadline_s: float = inf
) -> ObjectStore:
    """`folder` is that of a `file:` store, with the further folders into which its links may lead.
    Raises as `open_store`.
    """
    if folder is not None:
        return FolderReader(folder)
    return StoreReader(open_store(url, deadline_s=deadline_s))


class _Refusal:
    def put(self, key: str, data: Data) -> str:
        self._refuse(key)

    def create(self, key: str, data: Data) -> str:
        self._refuse(key)

    def swap(self, key: str, data: Data, etag: str) -> str:
        self._refuse(key)

    def delete(self, key: str) -> None:
        self._refuse(key)

    def delete_all(self, keys: Iterable[str]) -> None:
        self._refuse(next(iter(keys), ""))

    def _refuse(self, key: str) -> NoReturn:
        raise ReadOnly(f"object {key}: the store was opened for reading; nothing was written")


class StoreReader(_Refusal):
    def __init__(self, below: ObjectStore) -> None:
        self._below = below

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._below.get(key, start, end)

    def stat(self, key: str) -> ObjectStat:
        return self._below.stat(key)

    def read(self, key: str) -> tuple[bytes, str]:
        return self._below.read(key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self._below.list(prefix)


class FolderReader(_Refusal):
    """An object behind a link that leaves the folder raises `OutsideRun`."""

    def __init__(self, folder: ContainedFolder) -> None:
        self._folder = folder

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        assert 0 <= start <= (start if end is None else end), (key, start, end)
        with (
            translate_os_errors("read", self._folder.root / check_key(key)),
            self._folder.open(key) as file,
        ):
            file.seek(start)
            return file.read() if end is None else file.read(end - start)

    def stat(self, key: str) -> ObjectStat:
        content, etag = self.read(key)
        return ObjectStat(key, len(content), etag)

    def read(self, key: str) -> tuple[bytes, str]:
        content = self.get(key)
        return content, content_hash(content)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        with translate_os_errors("list", self._folder.root / folder):
            files = self._folder.walk(folder, skip=lambda name: "~" in name)
            entries = [
                ListedObject(key, size)
                for key, size in files
                if key.startswith(prefix) and is_key(key)
            ]
        return iter(sorted(entries, key=lambda entry: entry.key))

    def path(self, key: str) -> Path:
        """Returns the file's path, for readers that map files. Raises `ObjectMissing`, and
        `OutsideRun` if a link leaves the folder.
        """
        with translate_os_errors("read", self._folder.root / check_key(key)):
            return self._folder.file(key)
