"""The objects of a relay, by names from untrusted sources: they are matched whole, and nothing is
decoded, joined or normalised. Invalid text raises `ValueError`.
"""

import mmap
import os
import re
import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash
from msgspec import Struct

from rollstream.errors import CorruptObject, RollstreamError, StoreError
from rollstream.os_failures import explain_os_error
from rollstream.storage.model_folder.hf_folder import TEMPLATES
from rollstream.storage.weights.manifest import parse_version
from rollstream.streams.values import Version

MANIFEST = "manifest.json"
URL_FILE = "url"
"""The file in a relay's folder with the URL for processes of its node."""
_KEY = re.compile(
    r"weights/(v[0-9]{8,12}-t[0-9]{4,9})/"
    rf"((?:{TEMPLATES}/)?[A-Za-z0-9_=-][A-Za-z0-9._=-]{{0,199}})"
)
_HASH = re.compile(r"[0-9a-f]{32}")
WAIT_MAX_S = 60.0  # longest wait that a request may ask for
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
_INTEGER = re.compile(r"-?[0-9]{1,15}")


class ObjectOffer(Struct, frozen=True):
    """Key, size and xxh3-128 of an object; `verified`: all bytes are there and match."""

    key: str
    bytes: int
    hash: str
    verified: bool = False

    def is_same(self, other: "ObjectOffer") -> bool:
        return (self.key, self.bytes, self.hash) == (other.key, other.bytes, other.hash)

    @property
    def is_sound(self) -> bool:
        """Whether key, size and hash are well formed."""
        return bool(version_of(self.key) and self.bytes >= 0 and _HASH.fullmatch(self.hash))


def version_of(key: str) -> Version | None:
    """Returns the version whose folder `weights/VERSION/` the key is in; None for another key."""
    match = _KEY.fullmatch(key)
    version = parse_version(match[1]) if match else None
    return version if match and str(version) == match[1] else None


def file_name_of(key: str) -> str:
    return key.split("/", 2)[2]


def parse_key(path: str) -> str:
    """Returns the key after the path's first slash; raises `ValueError` if it is no key of a
    version's object.
    """
    key = path[1:]
    if not path.startswith("/") or version_of(key) is None:
        raise ValueError("no object of a version")
    return key


def parse_range(text: str | None, size: int) -> tuple[int | None, int]:
    """Returns `[start, end)`, cut at `size`; without the header `start` is None. More than one
    range is invalid.
    """
    if text is None:
        return None, size
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError("not one range of bytes")
    end = int(match[2]) + 1 if match[2] else size
    return int(match[1]), min(end, size)


def parse_push_range(content_range: str | None, content_length: str | None) -> tuple[int, int]:
    """Returns the byte from which a push (an upload up to the object's end) brings its object, and
    its size.
    """
    length = parse_integer(content_length or "-1")
    if content_range is None:
        start, size = 0, length
    else:
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or int(match[2]) + 1 != int(match[3]):
            raise ValueError("a push goes to the end of its object")
        start, size = int(match[1]), int(match[3])
    if not 0 <= length == size - start:
        raise ValueError("Content-Length is not the rest of the object")
    return start, size


def parse_integer(text: str) -> int:
    """Returns a whole number of at most 15 digits."""
    if not _INTEGER.fullmatch(text):
        raise ValueError("not a whole number")
    return int(text)


def parse_wait(query: Mapping[str, str]) -> float:
    """Returns the wait in seconds, from the query `wait=S`; 0 without."""
    wait_s = float(query.get("wait", "0"))
    if not 0 <= wait_s <= WAIT_MAX_S:
        raise ValueError(f"wait must be in [0, {WAIT_MAX_S:g}]")
    return wait_s


CHUNK_BYTES = 1 << 20  # bytes become visible to readers in whole chunks
RESERVE_BYTES = 8 << 20  # reserved at a time: a whole object would delay its first chunk


class ObjectBusy(RollstreamError, RuntimeError):
    """Raised while another writer holds this object."""


class ObjectDropped(RollstreamError, RuntimeError):
    """The object was dropped, or its bytes discarded, during a write or read."""


class CachedObject:
    """Bytes in a mapped file; threads may share it. Within `writing`, one writer at a time fills
    the memory that `room` returns and calls `advance`; the next continues at byte `written`. A
    reader calls `wait` and reads the first `received` bytes, whole chunks, through `descriptor`, so
    an object is forwarded while it is received.
    """

    def __init__(self, path: Path, offer: ObjectOffer) -> None:
        self.offer = offer
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        weakref.finalize(self, os.close, self._descriptor)  # readers may outlive the file's name
        os.ftruncate(self._descriptor, offer.bytes)
        self._map = memoryview(mmap.mmap(self._descriptor, offer.bytes)) if offer.bytes else None
        # Memory is reserved later (`room`).
        self._reserved = 0
        self._written = 0
        self._hash = xxhash.xxh3_128()
        self._changed = threading.Condition()
        self._writer = threading.Lock()
        self._dropped = False
        self.received = 0  # bytes that readers may read
        self.restarts = 0
        """How often the bytes were discarded and received from the start."""
        self.verified = False

    @property
    def key(self) -> str:
        return self.offer.key

    @property
    def descriptor(self) -> int:
        return self._descriptor

    @property
    def written(self) -> int:
        return self._written

    @property
    def dropped(self) -> bool:
        return self._dropped

    @contextmanager
    def writing(self, wait_s: float = 0.0) -> Generator["CachedObject"]:
        """Be the only writer. Raises `ObjectBusy` if another one writes for longer than `wait_s`.
        An empty object is verified at once.
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
        """Returns the memory up to the end of the present chunk; empty when all bytes are here.
        Raises `ObjectDropped`, and `StoreError` if the file system is full.
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
        """Counts new bytes. The last one checks the hash; a wrong one discards all bytes and raises
        `CorruptObject`.
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
        """Discard all bytes, so that they are received again. The caller must be the writer."""
        with self._changed:
            self._written = self.received = 0
            self._hash = xxhash.xxh3_128()
            self.restarts += 1
            self._changed.notify_all()

    def wait(self, beyond: int, restarts: int, wait_s: float) -> int:
        """Returns the number of bytes, once it once the number exceeds `beyond`, after `wait_s` at
        the latest. Raises `ObjectDropped` if the object was dropped, or begun again since
        `restarts`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.received > beyond or self._dropped or self.restarts != restarts, wait_s
            )
            if self._dropped or self.restarts != restarts:
                raise ObjectDropped(f"object {self.key} was dropped")
            return self.received

    def content(self) -> bytes:
        assert self.verified, self.key
        return os.pread(self._descriptor, self.offer.bytes, 0)

    def publish(self, path: Path) -> None:
        """Give the file the name under which processes of this node open it."""
        assert self.verified, self.key
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path.rename(path)
        self._path = path

    def drop(self) -> None:
        """Remove the file. A process that has it open can read to its end."""
        self._path.unlink(missing_ok=True)
        with self._changed:
            self._dropped = True
            self._changed.notify_all()

    def _reserve(self, end: int) -> None:
        try:  # a full file system raises here; a later write to the map would be killed by SIGBUS
            os.posix_fallocate(self._descriptor, self._reserved, end - self._reserved)
        except OSError as error:
            raise StoreError(
                f"no room for object {self.key} beside {self._path}: {explain_os_error(error)} "
                "(relay.bytes_max, relay.folder)"
            ) from error
        self._reserved = end
