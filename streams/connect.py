"""Opens a bus (the log) from its URL: `sqlite:FOLDER` or `kafka://HOST:PORT/PREFIX`.

A run on one machine needs no services: its log is SQLite files. A run on a cluster differs from it
only in this URL and in the URL of the object store.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rollstream.errors import BusError, ConfigurationError
from rollstream.streams.bus import Bus
from rollstream.streams.sqlite.bus import SqliteBus


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
            why = f"{server}: {error.strerror or error}"
        else:
            return
    raise BusError(
        f"no broker of {address} can be reached ({why}); does one run there, and is the URL right?"
    )


def _kafka(url: str, clock: Callable[[], float]) -> Bus:
    """Opens the Kafka bus. Its modules are imported only here, because a run on SQLite works
    without a Kafka client installed.
    """
    from rollstream.streams.kafka.address import parse_kafka_url, read_secrets

    address = parse_kafka_url(url)
    secrets = read_secrets(address, os.environ)
    try:
        from rollstream.streams.kafka.bus import KafkaBus
    except ImportError as error:
        raise ConfigurationError(
            f"{address} needs a Kafka client, and {error.name or error} is not installed; "
            "pip install 'rollstream[cloud]'"
        ) from error
    return KafkaBus(address, secrets, clock)
