"""A kind of log before one is opened; `BUSES` names the kinds by strings, so that a process imports
no client that its run does not use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rollstream.import_path import load_option

if TYPE_CHECKING:  # a command that only reads a URL needs neither records nor numpy
    from rollstream.contained_folder import ContainedFolder
    from rollstream.streams.bus import Bus

BUSES: Mapping[str, str] = {
    "sqlite:": "rollstream.streams.sqlite.kind:SqliteKind",
    "kafka://": "rollstream.streams.kafka.kind:KafkaKind",
}
"""By the begin of its URLs, `module:class` of the kind."""


@dataclass(frozen=True, slots=True)
class LogContents:
    """Full names in the log. `bytes` is the size of all topics, `where` the folder or the cluster.
    False if there are none.
    """

    where: str
    topics: tuple[str, ...]
    groups: tuple[str, ...]
    bytes: int

    def __bool__(self) -> bool:
        return bool(self.topics or self.groups)

    @property
    def has_ledger(self) -> bool:
        """Whether the run's ledger is there, by which a log is recognised."""
        return any(name.rpartition(".")[2] == "ledger" for name in self.topics)


@dataclass(frozen=True, slots=True)
class NamedBrokers:
    """The brokers that a URL names, and to which the user's secrets would be sent."""

    servers: tuple[str, ...]
    security: str
    is_encrypted: bool
    """Whether the secrets are sent encrypted, and to hosts that a public authority vouches for."""


class BusKind(Protocol):
    """A kind of log, asked with one of its URLs."""

    form: str
    """The form of its URLs, for messages."""

    def check(self, url: str) -> None:
        """Raise `ConfigurationError`, without a secret, if the URL is wrong. Nothing is opened."""
        ...

    def identity(self, url: str) -> str:
        """Returns what names the data; the rest of the URL may change during a run (invariant
        15).
        """
        ...

    def folder(self, url: str) -> Path | None:
        """Returns the folder of a log on this host; None for another one."""
        ...

    def named_brokers(self, url: str) -> NamedBrokers | None:
        """Returns the brokers that get secrets of the user; None if none are sent."""
        ...

    def function(self, url: str) -> str:
        """Returns the import path of the function that opening the log would call; "": none."""
        ...

    def check_reachable(self, url: str, wait_s: float) -> None:
        """Raise `BusError` if no server of the log accepts a connection within `wait_s`."""
        ...

    def check_client(self, url: str) -> None:
        """Raise `ConfigurationError` if this process cannot use the log: no client, a missing
        secret or file, a folder on a network file system.
        """
        ...

    def open(
        self, url: str, clock: Callable[[], float], sync: Literal["normal", "full"]
    ) -> "Bus": ...

    def open_for_reading(self, url: str, folder: "ContainedFolder | None") -> "Bus": ...

    def contents(self, url: str) -> LogContents: ...

    def remove(self, url: str, contents: LogContents) -> None: ...


@cache
def _load(name: str) -> BusKind:
    kind: type[BusKind] = load_option(BUSES[name])
    return kind()


def bus_kind(url: str) -> BusKind | None:
    """Returns None for a URL of another form."""
    names = (name for name in BUSES if url.startswith(name) and len(url) > len(name))
    return next(map(_load, names), None)


def bus_forms() -> list[str]:
    return [_load(name).form for name in BUSES]
