"""Makes a store of the objects under one prefix of another (`StorePart`)."""

from collections.abc import Iterable, Iterator

from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore


class StorePart:
    """The objects of `below` whose keys begin with `prefix`, which ends with `/`, under the rest of
    their keys. Errors have the complete keys (`complete_key`).
    """

    def __init__(self, below: ObjectStore, prefix: str) -> None:
        self._below, self._prefix = below, prefix

    def complete_key(self, key: str) -> str:
        return complete_key(self._below, self._prefix + key)

    def put(self, key: str, data: Data) -> str:
        return self._below.put(self._prefix + key, data)

    def create(self, key: str, data: Data) -> str:
        return self._below.create(self._prefix + key, data)

    def swap(self, key: str, data: Data, etag: str) -> str:
        return self._below.swap(self._prefix + key, data, etag)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._below.get(self._prefix + key, start, end)

    def stat(self, key: str) -> ObjectStat:
        stat = self._below.stat(self._prefix + key)
        return ObjectStat(key, stat.bytes, stat.etag)

    def read(self, key: str) -> tuple[bytes, str]:
        return self._below.read(self._prefix + key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        # Listed here and not in a generator, so that a wrong prefix raises at once.
        listed = self._below.list(self._prefix + prefix)
        return (ListedObject(e.key.removeprefix(self._prefix), e.bytes) for e in listed)

    def delete(self, key: str) -> None:
        self._below.delete(self._prefix + key)

    def delete_all(self, keys: Iterable[str]) -> None:
        self._below.delete_all(self._prefix + key for key in keys)


def complete_key(store: ObjectStore, key: str) -> str:
    """Returns the key by which people find the object, with the prefixes of parts."""
    return store.complete_key(key) if isinstance(store, StorePart) else key
