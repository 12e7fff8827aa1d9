"""The object store contract; each back end is a file beside this one.

All back ends give the same guarantees (one conformance suite):

* An object is complete or absent: no reader ever sees half of a write.
* `create` has exactly one winner; a retry that finds its own nonce has won.
* `swap` replaces only the object whose etag the caller saw.
* Readers never poll a listing: new objects are announced on a topic. `list` is for people,
  retention and tests.
* Etags distinguish contents, not writes: to distinguish writes, a swapped object contains a term or
  a count.

Keys are relative paths of `[A-Za-z0-9._=-]+` parts joined by `/`; any other key is refused before
it reaches the medium.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a listing. It has no etag, because a back end may have to read the object for
    it.
    """

    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Size and the etag that `swap` compares."""

    key: str
    bytes: int
    etag: str


class ObjectStore(Protocol):
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
        """Bytes `[start, end)`; a range past the end is cut off. Raises `ObjectMissing`."""
        ...

    def stat(self, key: str) -> ObjectStat:
        """Size and etag. Raises `ObjectMissing`."""
        ...

    def read(self, key: str) -> tuple[bytes, str]:
        """Content and etag of the same moment: the start of a compare-and-swap."""
        ...

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        """Objects whose key starts with `prefix`, by key."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is fine."""
        ...
