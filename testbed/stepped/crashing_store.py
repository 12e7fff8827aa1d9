"""A real object store as one process sees it: each write passes its gate."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore
from testbed.stepped.crashes import WriteGate


@dataclass
class CrashingStore:
    """See `ObjectStore`."""

    inner: ObjectStore
    gate: WriteGate

    def put(self, key: str, data: Data) -> str:
        return self.gate.write(_kind("put", key), lambda: self.inner.put(key, data))

    def create(self, key: str, data: Data) -> str:
        return self.gate.write(_kind("create", key), lambda: self.inner.create(key, data))

    def swap(self, key: str, data: Data, etag: str) -> str:
        return self.gate.write(_kind("swap", key), lambda: self.inner.swap(key, data, etag))

    def delete(self, key: str) -> None:
        self.gate.write(_kind("delete", key), lambda: self.inner.delete(key))

    def delete_all(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gate.look()
        return self.inner.get(key, start, end)

    def stat(self, key: str) -> ObjectStat:
        self.gate.look()
        return self.inner.stat(key)

    def read(self, key: str) -> tuple[bytes, str]:
        self.gate.look()
        return self.inner.read(key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        self.gate.look()
        return self.inner.list(prefix)


def _kind(what: str, key: str) -> str:
    """One kind for all versions, checkpoints and archive files."""
    return f"{what} {re.sub(r'[0-9a-f]{16,}|[0-9]+', 'N', key)}"
