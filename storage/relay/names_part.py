"""The objects that a relay can hold: those of a version's folder, and no others.

Names come from untrusted sources (a request's path, a neighbour's listing). They are matched as a
whole and unchanged: nothing is decoded, joined or normalised. A name that does not match has no
file.
"""

import re

from msgspec import Struct

from rollstream.storage.weights.manifest import parse_version
from rollstream.streams.values import Version

MANIFEST = "manifest.json"
URL_FILE = "url"
"""File in a relay's folder that holds the URL for processes of its node."""
_KEY = re.compile(r"weights/(v[0-9]{8,12}-t[0-9]{4,9})/([A-Za-z0-9_=-][A-Za-z0-9._=-]{0,199})")
_HASH = re.compile(r"[0-9a-f]{32}")


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
