"""One object in shared memory while it is received and afterwards.

Bytes come in order, from one writer at a time; whoever follows a writer that failed goes on at the
very byte where it stopped. Readers see them in whole chunks, as soon as each is here, so an object
is sent on while it is received. The hash runs along with the bytes, so the last one is also the
verdict: the object becomes `verified`, or it is empty again and `CorruptObject` says so.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from storage.relay.names import Offer
from streams.errors import CorruptObject, RollstreamError, StoreError

CHUNK_BYTES = 1 << 20
RESERVE_BYTES = 8 << 20  # of memory at a time: a whole object at once would delay its first chunk


class ObjectBusy(RollstreamError, RuntimeError):
    """Somebody else is writing this object."""


class ObjectDropped(RollstreamError, RuntimeError):
    """The object was given up while it was written or read."""


class HeldObject:
    """Threads may share it. The file has no name of its own until `publish`."""

    def __init__(self, path: Path, offer: Offer) -> None:
        """`path` must not exist; `StoreError` when the folder has no room for it."""
        self.offer = offer
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        weakref.finalize(self, os.close, self._descriptor)  # readers may outlive the name
        os.ftruncate(self._descriptor, offer.bytes)
        self._map = memoryview(mmap.mmap(self._descriptor, offer.bytes)) if offer.bytes else None
        self._reserved = 0
        self._at = 0
        self._hash = xxhash.xxh3_128()
        self._changed = threading.Condition()
        self._writer = threading.Lock()
        self._dropped = False
        self.received = 0
        self.turn = 0
        """How often it turned out wrong and began again."""
        self.verified = False

    @property
    def key(self) -> str:
        return self.offer.key

    @property
    def descriptor(self) -> int:
        """For `sendfile`, while this object is referred to."""
        return self._descriptor

    @property
    def at(self) -> int:
        """Where a writer goes on."""
        return self._at

    @property
    def dropped(self) -> bool:
        return self._dropped

    @contextmanager
    def writing(self, wait_s: float = 0.0) -> Generator["HeldObject"]:
        """`ObjectBusy` when another writer is at it for longer than `wait_s`."""
        if not self._writer.acquire(timeout=wait_s):
            raise ObjectBusy(f"object {self.key} is being received from elsewhere")
        try:
            if not self.offer.bytes and not self.verified:
                self.wrote(0)
            yield self
        finally:
            self._writer.release()

    def room(self) -> memoryview:
        """Where the next bytes go: up to the end of the present chunk; empty when all are here."""
        if self._dropped:
            raise ObjectDropped(f"object {self.key} was given up")
        if self._map is None:
            return memoryview(b"")
        end = min(self.offer.bytes, (self._at // CHUNK_BYTES + 1) * CHUNK_BYTES)
        if end > self._reserved:
            self._reserve(min(self.offer.bytes, self._at + RESERVE_BYTES))
        return self._map[self._at : end]

    def wrote(self, count: int) -> None:
        """`count` bytes were put into `room`; the last ones are the verdict (`CorruptObject`)."""
        self._at += count
        is_all = self._at == self.offer.bytes
        if not is_all and self._at % CHUNK_BYTES:
            return
        if self._map is not None:
            self._hash.update(self._map[self.received : self._at])
        digest = self._hash.hexdigest() if is_all else ""
        if is_all and digest != self.offer.hash:
            self.restart()
            raise CorruptObject(
                f"object {self.key} was received with hash {digest}, not {self.offer.hash}"
            )
        with self._changed:
            self.received, self.verified = self._at, is_all
            self._changed.notify_all()

    def restart(self) -> None:
        """Forget all its bytes; the caller is its writer."""
        with self._changed:
            self._at = self.received = 0
            self._hash = xxhash.xxh3_128()
            self.turn += 1
            self._changed.notify_all()

    def wait(self, beyond: int, turn: int, wait_s: float) -> int:
        """Bytes received, at the latest after `wait_s`, sooner when there are more than `beyond`.

        `ObjectDropped` when it was given up or began again since `turn`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.received > beyond or self._dropped or self.turn != turn, wait_s
            )
            if self._dropped or self.turn != turn:
                raise ObjectDropped(f"object {self.key} was given up")
            return self.received

    def content(self) -> bytes:
        """All of it."""
        assert self.verified, self.key
        return os.pread(self._descriptor, self.offer.bytes, 0)

    def publish(self, path: Path) -> None:
        """Give it the name under which processes of this node open it."""
        assert self.verified, self.key
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path.rename(path)
        self._path = path

    def drop(self) -> None:
        """Forget it; who reads it already may end."""
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
