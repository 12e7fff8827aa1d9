"""Defines the contract of an object store. Each back end is a file or folder beside this one, and
all give these guarantees (one conformance suite tests them):

* An object is complete or absent: no reader ever sees half of a write.
* `create` has exactly one winner; a retry that finds its own nonce has won.
* `swap` replaces only the object whose etag the caller saw.
* Readers never poll a listing: new objects are announced on a topic. `list` is for people,
  retention and tests.
* An etag (a back end's short name for an object's content) distinguishes contents, not writes. A
  swapped object contains a term or a count, so that two writes of it always differ.

A key is one or more parts of `[A-Za-z0-9._=-]` joined by `/`. Any other key is refused before it
reaches a back end, so no key can leave its store's folder, and names with other characters are free
for a back end's own files.

The hash of all stored content is xxh3-128 in hex. It detects damage and tells contents apart (10
GB/s on one core). It does not protect against deliberate forgery, which a store that others can
write to would need.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from rollstream.errors import ConfigurationError

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Describes one object of a listing. It has no etag, because a back end may have to read the
    object to compute it.
    """

    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Holds the size of an object and the etag that `swap` compares."""

    key: str
    bytes: int
    etag: str


class ObjectStore(Protocol):
    """Stores bytes under keys, with the guarantees of this module."""

    def put(self, key: str, data: Data) -> str:
        """Write or replace the object; returns the etag."""
        ...

    def create(self, key: str, data: Data) -> str:
        """Write the object if it is absent, else raise `ObjectExists`; returns the etag."""
        ...

    def swap(self, key: str, data: Data, etag: str) -> str:
        """Replace the object if it has this etag, else raise `SwapLost`; returns the new etag."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes `[start, end)`, cut off at the object's end. Raises `ObjectMissing`."""
        ...

    def stat(self, key: str) -> ObjectStat:
        """Return size and etag. Raises `ObjectMissing`."""
        ...

    def read(self, key: str) -> tuple[bytes, str]:
        """Return content and etag of the same moment, with which a compare-and-swap starts. Raises
        `ObjectMissing`.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        """Return the objects whose key starts with `prefix`, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        ...

    def delete_all(self, keys: Iterable[str]) -> None:
        """Remove these objects in any order, in few requests where the back end can; absent ones
        are no error. If the call raises or its process dies, any of them may be left, so a caller
        that needs an order makes one call for the objects that must be deleted first.
        """
        ...


KEY_BYTES_MAX = 1024  # S3's limit for a whole key
PART_BYTES_MAX = 255  # the usual limit of file systems for one name

_KEY = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_PREFIX = re.compile(r"[A-Za-z0-9._=/-]*")


class KeyRefused(ConfigurationError):
    """No back end accepts the key or prefix, for example because of a name in a configuration."""


def is_key(key: str) -> bool:
    """Return whether every back end can hold this key."""
    parts = key.split("/")
    short = len(key) <= KEY_BYTES_MAX and max(map(len, parts)) <= PART_BYTES_MAX
    return short and bool(_KEY.fullmatch(key)) and {".", ".."}.isdisjoint(parts)


def check_key(key: str) -> str:
    """Return the key if every back end can hold it; else raise `KeyRefused`."""
    if not is_key(key):
        raise KeyRefused(
            f"object key {key[:80]!r}: use parts of [A-Za-z0-9._=-] joined by single '/', "
            f"{PART_BYTES_MAX} bytes a part and {KEY_BYTES_MAX} in all at most"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if keys can start with it; else raise `KeyRefused`."""
    refused = not _PREFIX.fullmatch(prefix) or prefix.startswith("/") or "//" in prefix
    if refused or not {".", ".."}.isdisjoint(prefix.split("/")[:-1]):
        raise KeyRefused(f"object prefix {prefix!r}: no object's key can start with it")
    return prefix


def content_hash(data: Data) -> str:
    """Return the xxh3-128 of the bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)
