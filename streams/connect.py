"""Opens a bus from its URL: `sqlite:FOLDER` or `kafka://HOST:PORT/PREFIX`. A run on a cluster
differs from an embedded one only in this URL and the store's.
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
    """The bus at `url`. `clock` stamps records and measures leases. `sync="full"` makes SQLite
    survive power loss; on Kafka the brokers' replicas do.
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
    """Raise `BusError` at once if no broker of a `kafka:` URL accepts a connection. Used when a
    command starts: the bus itself waits a minute for brokers that restart, and a mistyped URL
    should fail sooner.
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
    """The Kafka modules are imported here because an embedded run has no Kafka client installed."""
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
