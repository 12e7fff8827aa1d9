"""The object store contract; back ends stand beside this file.

Guarantees, the same on every back end (one conformance suite):

* An object is whole or absent: no reader ever sees half of a write.
* `create` has exactly one winner; a retry that finds its own bytes' nonce has won.
* `swap` replaces only the very object whose etag the caller saw.
* Nothing polls a listing: what is new is announced on a topic. `list` is for people, retention and
  tests.
* Etags tell contents apart, not writes: whoever swaps a key puts a term or a count into what is
  written there.

Keys are relative paths of `[A-Za-z0-9._=-]+` parts joined by `/`; anything else is refused before
it touches the medium.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing, without an etag: a back end may have to read the object for it."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and the etag that `swap` compares."""

    key: str
    bytes: int
    etag: str


class ObjectStore(Protocol):
    def put(self, key: str, data: Data) -> str:
        """Write or replace; returns the etag."""
        ...

    def create(self, key: str, data: Data) -> str:
        """Write only if absent, else `ObjectExists`; returns the etag."""
        ...

    def swap(self, key: str, data: Data, etag: str) -> str:
        """Replace the object that has this etag, else `SwapLost`; returns the new etag."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes `[start, end)`, or `ObjectMissing`; a range past the end is cut off."""
        ...

    def stat(self, key: str) -> Stat:
        """Size and etag, or `ObjectMissing`."""
        ...

    def read(self, key: str) -> tuple[bytes, str]:
        """Content and its etag, of the same moment: what a compare-and-swap starts from."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Objects whose key starts with `prefix`, by key."""
        ...

    def delete(self, key: str) -> None:
        """Remove; absent is fine."""
        ...
