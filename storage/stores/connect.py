"""Opens an object store from its URL."""

from typing import Literal

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.memory import MemoryStore
from rollstream.storage.stores.s3.address import parse_s3_url


def open_store(url: str, sync: Literal["normal", "full"] = "normal") -> ObjectStore:
    """The store that `url` names; every `memory:` is a new one.

    `sync` is for back ends on disks (see `FileStore`).
    """
    scheme, separator, rest = url.partition(":")
    if scheme == "file" and rest:
        return FileStore(rest.removeprefix("//"), sync)
    if url == "memory:":
        return MemoryStore()
    if url.startswith("s3://"):
        return _open_s3(url)
    known = "file:PATH, memory:, s3://BUCKET/PREFIX"
    what = f"unknown scheme {scheme!r}" if separator else "no scheme"
    raise ConfigurationError(f"store URL {url!r}: {what}; known are {known}")


def _open_s3(url: str) -> ObjectStore:
    # boto3 is an extra and takes half a second to import, so only runs with a bucket import it.
    place = parse_s3_url(url)
    try:
        from rollstream.storage.stores.s3.store import S3Store
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"store s3://…: {error.name} is not installed; pip install 'rollstream[cloud]'"
        ) from None
    return S3Store(place)
