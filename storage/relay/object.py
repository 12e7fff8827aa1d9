"""One object in shared memory, while it is received and afterwards.

Bytes arrive in order, from one writer at a time. The next writer continues at the byte where a
failed one stopped. Readers see whole chunks as soon as each is complete, so an object is forwarded
while it is received. The hash is computed as bytes arrive, so the last byte also decides: the
object becomes `verified`, or it is emptied and `CorruptObject` is raised.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from rollstream.errors import CorruptObject, RollstreamError, StoreError
from rollstream.storage.relay.names import ObjectOffer

CHUNK_BYTES = 1 << 20
RESERVE_BYTES = 8 << 20  # reserved at a time: a whole object would delay its first chunk


class ObjectBusy(RollstreamError, RuntimeError):
    """Another writer holds this object."""


class ObjectDropped(RollstreamError, RuntimeError):
    """The object was dropped while it was written or read."""


class CachedObject:
    """Threads may share it. The file gets its final name by `publish`."""

    def __init__(self, path: Path, offer: ObjectOffer) -> None:
        """`path` must not exist. Raises `StoreError` if the folder has no room for the object."""
        self.offer = offer
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        weakref.finalize(self, os.close, self._descriptor)  # readers may outlive the file's name
        os.ftruncate(self._descriptor, offer.bytes)
        self._map = memoryview(mmap.mmap(self._descriptor, offer.bytes)) if offer.bytes else None
        self._reserved = 0
        self._written = 0
        self._hash = xxhash.xxh3_128()
        self._changed = threading.Condition()
        self._writer = threading.Lock()
        self._dropped = False
        self.received = 0
        self.restarts = 0
        """How often it was received wrong and restarted."""
        self.verified = False

    @property
    def key(self) -> str:
        return self.offer.key

    @property
    def descriptor(self) -> int:
        """For `sendfile`; valid while this object is referenced."""
        return self._descriptor

    @property
    def written(self) -> int:
        """The byte at which a writer continues."""
        return self._written

    @property
    def dropped(self) -> bool:
        return self._dropped

    @contextmanager
    def writing(self, wait_s: float = 0.0) -> Generator["CachedObject"]:
        """Hold the write lock. Raises `ObjectBusy` if another writer holds it for longer than
        `wait_s`.
        """
        if not self._writer.acquire(timeout=wait_s):
            raise ObjectBusy(f"object {self.key} is being received from elsewhere")
        try:
            if not self.offer.bytes and not self.verified:
                self.advance(0)
            yield self
        finally:
            self._writer.release()

    def room(self) -> memoryview:
        """Memory for the next bytes, up to the end of the present chunk; empty when all bytes are
        here.
        """
        if self._dropped:
            raise ObjectDropped(f"object {self.key} was dropped")
        if self._map is None:
            return memoryview(b"")
        end = min(self.offer.bytes, (self._written // CHUNK_BYTES + 1) * CHUNK_BYTES)
        if end > self._reserved:
            self._reserve(min(self.offer.bytes, self._written + RESERVE_BYTES))
        return self._map[self._written : end]

    def advance(self, count: int) -> None:
        """Note that `count` bytes were written to `room`. With the last byte the hash is checked
        (`CorruptObject`).
        """
        self._written += count
        is_all = self._written == self.offer.bytes
        if not is_all and self._written % CHUNK_BYTES:
            return
        if self._map is not None:
            self._hash.update(self._map[self.received : self._written])
        digest = self._hash.hexdigest() if is_all else ""
        if is_all and digest != self.offer.hash:
            self.restart()
            raise CorruptObject(
                f"object {self.key} was received with hash {digest}, not {self.offer.hash}"
            )
        with self._changed:
            self.received, self.verified = self._written, is_all
            self._changed.notify_all()

    def restart(self) -> None:
        """Discard all bytes. The caller must be the writer."""
        with self._changed:
            self._written = self.received = 0
            self._hash = xxhash.xxh3_128()
            self.restarts += 1
            self._changed.notify_all()

    def wait(self, beyond: int, restarts: int, wait_s: float) -> int:
        """Return the number of bytes received, after `wait_s` at the latest, sooner if it exceeds
        `beyond`.

        Raises `ObjectDropped` if the object was dropped, or restarted since `restarts`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.received > beyond or self._dropped or self.restarts != restarts, wait_s
            )
            if self._dropped or self.restarts != restarts:
                raise ObjectDropped(f"object {self.key} was dropped")
            return self.received

    def content(self) -> bytes:
        """The whole object, which must be verified."""
        assert self.verified, self.key
        return os.pread(self._descriptor, self.offer.bytes, 0)

    def publish(self, path: Path) -> None:
        """Give the file the name under which processes of this node open it."""
        assert self.verified, self.key
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path.rename(path)
        self._path = path

    def drop(self) -> None:
        """Remove it. A reader that has it open can finish."""
        self._path.unlink(missing_ok=True)
        with self._changed:
            self._dropped = True
            self._changed.notify_all()

    def _reserve(self, end: int) -> None:
        try:  # a full file system is an error here, and a SIGBUS in the mapped memory
            os.posix_fallocate(self._descriptor, self._reserved, end - self._reserved)
        except OSError as error:
            raise StoreError(
                f"no room for object {self.key} beside {self._path}: {error.strerror} "
                "(relay.bytes_max, relay.folder)"
            ) from error
        self._reserved = end
