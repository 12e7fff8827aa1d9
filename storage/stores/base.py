"""The contract of an object store (`ObjectStore`), its keys (`is_key`) and the hash of contents."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from rollstream.errors import ConfigurationError

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Without an etag, which a back end may have to compute."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ObjectStat:
    key: str
    bytes: int
    etag: str


class ObjectStore(Protocol):
    """All back ends give these guarantees:

    * An object is complete or absent: no reader ever sees half of a write.
    * `create` has exactly one winner.
    * `swap` is a compare-and-swap: it replaces the object only if its etag is still the one that
      the caller read. An etag is a back end's short name for an object's content.

    Callers follow these rules:

    * After a lost response a writer reads the object. If it holds this writer's content, or a
      random number that no other process uses, the write took effect.
    * Etags distinguish contents, not writes: an object that is swapped contains a term or a count,
      so that any two writes differ.
    * No process polls `list` for new objects, which are announced on a topic.
    """

    def put(self, key: str, data: Data) -> str: ...

    def create(self, key: str, data: Data) -> str:
        """Write the object if it is absent, else raise `ObjectExists`; returns the etag."""
        ...

    def swap(self, key: str, data: Data, etag: str) -> str:
        """Replace the object if it has this etag, else raise `SwapLost`; returns the new etag."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns bytes `[start, end)`, cut off at the object's end. Raises `ObjectMissing`."""
        ...

    def stat(self, key: str) -> ObjectStat:
        """Returns size and etag. Raises `ObjectMissing`."""
        ...

    def read(self, key: str) -> tuple[bytes, str]:
        """Returns the content and its etag, for a later `swap`. Raises `ObjectMissing`."""
        ...

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        """Returns the objects whose key starts with `prefix`, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        ...

    def delete_all(self, keys: Iterable[str]) -> None:
        """Removes objects in any order; absent ones are no error. If the call raises or its process
        dies, any may be left: a caller that needs an order deletes the first ones in a call of
        their own.
        """
        ...


KEY_BYTES_MAX = 1024  # S3's limit for a whole key
PART_BYTES_MAX = 255  # the usual limit of file systems for one name

_KEY = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_PREFIX = re.compile(r"[A-Za-z0-9._=/-]*")


class KeyRefused(ConfigurationError):
    """No back end accepts this key or prefix; usually it is built from a name in the
    configuration.
    """


def is_key(key: str) -> bool:
    """Whether every back end can hold this key: parts of `[A-Za-z0-9._=-]` joined by `/`, none of
    them `.` or `..`, of at most `PART_BYTES_MAX` and `KEY_BYTES_MAX` bytes.
    """
    parts = key.split("/")
    short = len(key) <= KEY_BYTES_MAX and max(map(len, parts)) <= PART_BYTES_MAX
    return short and bool(_KEY.fullmatch(key)) and {".", ".."}.isdisjoint(parts)


def check_key(key: str) -> str:
    """Returns the key if every back end can hold it; else raises `KeyRefused`."""
    if not is_key(key):
        raise KeyRefused(
            f"object key {key[:80]!r}: use parts of [A-Za-z0-9._=-] joined by single '/', "
            f"{PART_BYTES_MAX} bytes a part and {KEY_BYTES_MAX} in all at most"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Returns the prefix if keys can start with it; else raises `KeyRefused`."""
    refused = not _PREFIX.fullmatch(prefix) or prefix.startswith("/") or "//" in prefix
    if refused or not {".", ".."}.isdisjoint(prefix.split("/")[:-1]):
        raise KeyRefused(f"object prefix {prefix!r}: no object's key can start with it")
    return prefix


def content_hash(data: Data) -> str:
    """Returns the xxh3-128 of the bytes, as 32 hex digits, at 10 GB/s on one core. It does not
    protect against deliberate forgery.
    """
    return xxhash.xxh3_128_hexdigest(data)
