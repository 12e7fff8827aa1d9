"""An object store whose process dies at a chosen write, before or after the write takes effect."""

from collections.abc import Iterable, Iterator

from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore


class Killed(Exception):
    """The process ends here; nothing in the product may handle it."""


class FaultyStore:
    """Forwards all calls to `store`, and raises `Killed` at write number `fatal` (from 0)."""

    def __init__(self, store: ObjectStore, fatal: int, after: bool) -> None:
        self._store, self._fatal, self._after = store, fatal, after
        self.writes = 0

    def put(self, key: str, data: Data) -> str:
        return self._write(lambda: self._store.put(key, data))

    def create(self, key: str, data: Data) -> str:
        return self._write(lambda: self._store.create(key, data))

    def swap(self, key: str, data: Data, etag: str) -> str:
        return self._write(lambda: self._store.swap(key, data, etag))

    def delete(self, key: str) -> None:
        self._write(lambda: self._store.delete(key))

    def delete_all(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._store.get(key, start, end)

    def stat(self, key: str) -> ObjectStat:
        return self._store.stat(key)

    def read(self, key: str) -> tuple[bytes, str]:
        return self._store.read(key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self._store.list(prefix)

    def _write(self, step):
        fatal = self.writes == self._fatal
        self.writes += 1
        if fatal and not self._after:
            raise Killed
        result = step()
        if fatal:
            raise Killed
        return result
