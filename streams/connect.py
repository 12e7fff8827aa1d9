"""Opens a bus (the log) from its URL: `sqlite:FOLDER` or `kafka://HOST:PORT/PREFIX`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NoReturn

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, ReadOnly
from rollstream.streams.bus import AppendEntry, Bus, GroupReader
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.kind import BusKind, bus_forms, bus_kind
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic


def open_bus(
    url: str,
    clock: Callable[[], float] = time.time,
    sync: Literal["normal", "full"] = "normal",
) -> Bus:
    """Opens the bus; raises `ConfigurationError` for a URL of another form. `clock` stamps records;
    on SQLite it also measures leases. With `sync="full"` acknowledged records survive power loss on
    SQLite.
    """
    return _kind(url).open(url, clock, sync)


def open_bus_for_reading(url: str, folder: ContainedFolder | None) -> Bus:
    """Opens a bus for a reader: nothing is made or changed, and a write raises `ReadOnly`. `folder`
    is that of a `sqlite:` bus.
    """
    return _kind(url).open_for_reading(url, folder)


def check_reachable(url: str, wait_s: float = 5.0) -> None:
    """Raise `BusError` if no server accepts a connection within `wait_s` each. A log in a folder
    has none.
    """
    # The bus itself waits a minute for brokers that restart; a wrong URL should fail sooner.
    if (kind := bus_kind(url)) is not None:
        kind.check_reachable(url, wait_s)


def check_client(url: str) -> None:
    if (kind := bus_kind(url)) is not None:
        kind.check_client(url)


def _kind(url: str) -> BusKind:
    kind = bus_kind(url)
    if kind is None:
        raise ConfigurationError(
            f"{url!r} is not the URL of a bus; give {' or '.join(bus_forms())}"
        )
    return kind


class BusReader(BusWrapper):
    def create(self, topics: Sequence[Topic]) -> None:
        self._refuse()

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        self._refuse()

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self._refuse()

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        self._refuse()

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ReadOnly("the log was opened for reading; nothing was written")
