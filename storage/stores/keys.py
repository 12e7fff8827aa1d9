"""The keys that object stores accept, the same on every back end.

A key is one or more parts of `[A-Za-z0-9._=-]` joined by `/`. No other text reaches a back end, so
no key can leave its store's folder, and names with other characters are free for a back end's own
files.
"""

import re

from rollstream.errors import ConfigurationError

KEY_BYTES_MAX = 1024  # S3's limit for a whole key
PART_BYTES_MAX = 255  # the usual limit of file systems for one name

_KEY = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_PREFIX = re.compile(r"[A-Za-z0-9._=/-]*")


class KeyRefused(ConfigurationError):
    """A key or prefix that no back end accepts, for example from a bad name in a configuration."""


def is_key(key: str) -> bool:
    """Whether every back end can hold this key."""
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
