"""From a store's URL to the store."""

from typing import Literal

from storage.file_store import FileStore
from storage.memory_store import MemoryStore
from storage.objects import ObjectStore
from streams.errors import ConfigurationError


def open_store(url: str, sync: Literal["normal", "full"] = "normal") -> ObjectStore:
    """The store that `url` names; every `memory:` is a new one.

    `sync` is for back ends on disks (see `FileStore`).
    """
    scheme, separator, rest = url.partition(":")
    if scheme == "file" and rest:
        return FileStore(rest.removeprefix("//"), sync)
    if url == "memory:":
        return MemoryStore()
    known = "file:PATH, memory:"
    what = f"unknown scheme {scheme!r}" if separator else "no scheme"
    raise ConfigurationError(f"store URL {url!r}: {what}; known are {known}")
