"""The objects that a relay can hold (those of a version's folder, no others), and the parsing of
requests for them. Pure.

Names come from untrusted sources (a request's path, a neighbour's listing). They are matched as a
whole and unchanged: nothing is decoded, joined or normalised. A name that does not match has no
file. Every invalid text raises `ValueError`.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from rollstream.storage.weights.manifest import parse_version
from rollstream.streams.values import Version

MANIFEST = "manifest.json"
URL_FILE = "url"
"""File in a relay's folder that holds the URL for processes of its node."""
_KEY = re.compile(r"weights/(v[0-9]{8,12}-t[0-9]{4,9})/([A-Za-z0-9_=-][A-Za-z0-9._=-]{0,199})")
_HASH = re.compile(r"[0-9a-f]{32}")
WAIT_MAX_S = 60.0
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
_INTEGER = re.compile(r"-?[0-9]{1,15}")


class ObjectOffer(Struct, frozen=True):
    """An object that a relay has or is receiving: key, size and xxh3-128 of its content.
    `verified`: the relay has compared them.
    """

    key: str
    bytes: int
    hash: str
    verified: bool = False

    def is_same(self, other: "ObjectOffer") -> bool:
        """Whether both name the same content."""
        return (self.key, self.bytes, self.hash) == (other.key, other.bytes, other.hash)

    @property
    def is_sound(self) -> bool:
        """Whether key, size and hash are well formed."""
        return bool(version_of(self.key) and self.bytes >= 0 and _HASH.fullmatch(self.hash))


def version_of(key: str) -> Version | None:
    """The version to whose folder the object belongs; None for any other key."""
    match = _KEY.fullmatch(key)
    version = parse_version(match[1]) if match else None
    return version if match and str(version) == match[1] else None


def file_name_of(key: str) -> str:
    """The object's name in that folder."""
    return key.rpartition("/")[2]


def parse_key(path: str) -> str:
    """The object's key, or `ValueError`. Nothing in the path is decoded."""
    key = path[1:]
    if not path.startswith("/") or version_of(key) is None:
        raise ValueError("no object of a version")
    return key


def parse_range(text: str | None, size: int) -> tuple[int | None, int]:
    """`[start, end)` of a single range, cut at the object's end; start is None without a range."""
    if text is None:
        return None, size
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError("not one range of bytes")
    end = int(match[2]) + 1 if match[2] else size
    return int(match[1]), min(end, size)


def parse_push_range(content_range: str | None, content_length: str | None) -> tuple[int, int]:
    """The start of a push in its object, and the object's size. A push always ends at the object's
    end.
    """
    left = parse_integer(content_length or "-1")
    if content_range is None:
        start, size = 0, left
    else:
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or int(match[2]) + 1 != int(match[3]):
            raise ValueError("a push goes to the end of its object")
        start, size = int(match[1]), int(match[3])
    if not 0 <= left == size - start:
        raise ValueError("Content-Length is not the rest of the object")
    return start, size


def parse_integer(text: str) -> int:
    """A whole number of at most 15 digits."""
    if not _INTEGER.fullmatch(text):
        raise ValueError("not a whole number")
    return int(text)


def parse_wait(query: Mapping[str, str]) -> float:
    """The seconds that the client is ready to wait."""
    wait_s = float(query.get("wait", "0"))
    if not 0 <= wait_s <= WAIT_MAX_S:
        raise ValueError(f"wait must be in [0, {WAIT_MAX_S:g}]")
    return wait_s
