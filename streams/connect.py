"""Opens a bus (the log) from its URL: `sqlite:FOLDER` or `kafka://HOST:PORT/PREFIX`.

A run on one machine needs no services: its log is SQLite files. A run on a cluster differs from it
only in this URL and in the URL of the object store.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Literal, NoReturn

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import BusError, ConfigurationError, ReadOnly
from rollstream.os_failures import explain_os_error
from rollstream.streams.bus import AppendEntry, Bus, BusWrapper, GroupReader
from rollstream.streams.records import Position
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.read_only import SqliteReader
from rollstream.streams.topics import Topic

FIRST_ANSWER_S = 5.0
"""A reader waits so long for the first answer of brokers: a wrong URL, or a host that is no broker,
should fail soon.
"""


def open_bus(
    url: str,
    clock: Callable[[], float] = time.time,
    sync: Literal["normal", "full"] = "normal",
) -> Bus:
    """Opens the bus at `url`; a URL of another form raises `ConfigurationError`. `clock` stamps
    records; on SQLite it also measures how long a member of a consumer group holds its partitions.
    With `sync="full"` acknowledged records survive power loss on SQLite; on Kafka the brokers'
    replicas keep them.
    """
    scheme, _, path = url.partition(":")
    if scheme == "sqlite" and path:
        return SqliteBus(Path(path), clock, sync=sync)
    if url.startswith("kafka://"):
        return _kafka(url, clock)
    raise ConfigurationError(
        f"{url!r} is not the URL of a bus; give sqlite:FOLDER or kafka://HOST:PORT/PREFIX"
    )


def open_bus_for_reading(url: str, folder: ContainedFolder | None) -> Bus:
    """Opens the bus at `url` for a reader of a run, which may come from another user: nothing is
    made or changed, and a write raises `ReadOnly`. `folder` is that of a `sqlite:` bus. The caller
    has checked that secrets may be sent to the hosts of another one, whose first answer is waited
    for `FIRST_ANSWER_S`, later ones as long as by a writer.
    """
    if folder is not None:
        return SqliteReader(folder)
    if url.startswith("kafka://"):
        return BusReader(_kafka(url, time.time, FIRST_ANSWER_S))
    return BusReader(open_bus(url))


class BusReader(BusWrapper):
    """Passes reads to the bus `below`, and refuses writes."""

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


def check_reachable(url: str, wait_s: float = 5.0) -> None:
    """Raise `BusError` if no broker of a `kafka:` URL accepts a connection; each is tried for at
    most `wait_s`. Commands call it when they start: the bus itself waits a minute for brokers that
    restart, and a wrong URL should fail sooner. Other URLs are not checked.
    """
    if not url.startswith("kafka://"):
        return
    from rollstream.streams.kafka.address import parse_kafka_url

    address, why = parse_kafka_url(url), ""
    for server in address.servers:
        host, _, port = server.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), wait_s).close()
        except OSError as error:
            why = f"{server}: {explain_os_error(error)}"
        else:
            return
    raise BusError(f"no broker of {address} can be reached ({why})")


def check_client(url: str) -> None:
    """Raise `ConfigurationError` for what keeps this process from connecting to any broker of a
    `kafka:` URL: no client installed, a secret or a file that is not there.
    """
    if not url.startswith("kafka://"):
        return
    from rollstream.streams.kafka.address import parse_kafka_url, read_secrets

    address = parse_kafka_url(url)
    secrets = read_secrets(address, os.environ)
    try:
        from rollstream.streams.kafka.client import base_settings
    except ImportError as error:
        raise _no_kafka_client(address, error) from error
    base_settings(address, secrets)


def _no_kafka_client(address: object, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"{address} needs a Kafka client, and {error.name or error} is not installed; "
        "pip install 'rollstream[cloud]'"
    )


def _kafka(url: str, clock: Callable[[], float], first_answer_s: float = inf) -> Bus:
    """Opens the Kafka bus. Its modules are imported only here, because a run on SQLite works
    without a Kafka client installed.
    """
    from rollstream.streams.kafka.address import parse_kafka_url, read_secrets

    address = parse_kafka_url(url)
    secrets = read_secrets(address, os.environ)
    try:
        from rollstream.streams.kafka.bus import KafkaBus
    except ImportError as error:
        raise _no_kafka_client(address, error) from error
    return KafkaBus(address, secrets, clock, first_answer_s=first_answer_s)
