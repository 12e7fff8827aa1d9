"""Object store in one process's memory with the complete contract, for tests and the simulator."""

import threading
from collections.abc import Iterator

from rollstream.errors import ObjectExists, ObjectMissing, SwapLost
from rollstream.storage.stores.base import (
    Data,
    ListedObject,
    ObjectStat,
    check_key,
    check_prefix,
    content_hash,
)


class MemoryStore:
    """The `memory:` store; safe to share between threads; its objects end with the process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> str:
        content = bytes(data)
        with self._lock:
            self._objects[check_key(key)] = content
        return content_hash(content)

    def create(self, key: str, data: Data) -> str:
        content = bytes(data)
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExists(f"object {key} is already in the memory store")
            self._objects[key] = content
        return content_hash(content)

    def swap(self, key: str, data: Data, etag: str) -> str:
        content = bytes(data)
        with self._lock:
            present = self._objects.get(check_key(key))
            if present is None or content_hash(present) != etag:
                raise SwapLost(f"object {key} in the memory store is not the expected {etag}")
            self._objects[key] = content
        return content_hash(content)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        assert 0 <= start <= (start if end is None else end), (key, start, end)
        return self._content(key)[start:end]

    def stat(self, key: str) -> ObjectStat:
        content = self._content(key)
        return ObjectStat(key, len(content), content_hash(content))

    def read(self, key: str) -> tuple[bytes, str]:
        content = self._content(key)
        return content, content_hash(content)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        check_prefix(prefix)
        with self._lock:
            present = sorted(self._objects.items())
        return (ListedObject(key, len(data)) for key, data in present if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def _content(self, key: str) -> bytes:
        with self._lock:
            content = self._objects.get(check_key(key))
        if content is None:
            raise ObjectMissing(f"no object {key} in the memory store")
        return content
