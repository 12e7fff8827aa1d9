"""A kind of object store before one is opened; `STORES` names the kinds by strings, so that a
process imports no client that its run does not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

from rollstream.import_path import load_option
from rollstream.storage.stores.base import ObjectStore

STORES: Mapping[str, str] = {
    "file:": "rollstream.storage.stores.file_kind:FileKind",
    "s3://": "rollstream.storage.stores.s3.kind:S3Kind",
}
"""By the begin of its URLs, `module:class` of the kind."""


@dataclass(frozen=True, slots=True)
class NamedServer:
    url: str
    host: str
    """`name:port`."""
    is_encrypted: bool
    what: str
    """For messages, as `the S3 server`."""
    credentials: str
    """Whose credentials are sent, as `AWS`."""
    variable: str
    """The environment variable by which a user names such a server."""


class StoreKind(Protocol):
    """A kind of store; nothing here opens a connection or reads a file."""

    form: str
    """The form of its URLs, for messages."""

    def check(self, url: str) -> None:
        """Raise `ConfigurationError`, without a secret, if the URL is wrong."""
        ...

    def identity(self, url: str) -> str:
        """Returns what names the data; the rest of the URL may change during a run (invariant
        15).
        """
        ...

    def named_server(self, url: str) -> NamedServer | None:
        """Returns the server that only this URL names, and to which the user's credentials would
        go. Raises `ConfigurationError` if the URL could hide one.
        """
        ...

    def open(self, url: str, sync: Literal["normal", "full"], deadline_s: float) -> ObjectStore: ...


@cache
def _load(name: str) -> StoreKind:
    kind: type[StoreKind] = load_option(STORES[name])
    return kind()


def store_kind(url: str) -> StoreKind | None:
    """Returns None for a URL of another form."""
    names = (name for name in STORES if url.startswith(name) and len(url) > len(name))
    return next(map(_load, names), None)


def store_forms() -> list[str]:
    return [_load(name).form for name in STORES]
