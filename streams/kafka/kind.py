"""The kind of logs in a Kafka cluster (`KafkaKind`). kafka-python is an extra, so only what
connects imports it.
"""

import os
import socket
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from rollstream.errors import BusError, ConfigurationError
from rollstream.os_failures import explain_os_error
from rollstream.streams.kafka.address import parse_kafka_url, read_secrets
from rollstream.streams.kind import LogContents, NamedBrokers

if TYPE_CHECKING:
    from rollstream.contained_folder import ContainedFolder
    from rollstream.streams.bus import Bus

FIRST_ANSWER_S = 5.0
"""A wrong URL, or a host that is no broker, should fail soon."""


class KafkaKind:
    form = "kafka://HOST:PORT/PREFIX"

    def check(self, url: str) -> None:
        parse_kafka_url(url)  # its errors contain no secret of the options

    def identity(self, url: str) -> str:
        return f"kafka:///{urlsplit(url).path.strip('/')}"

    def folder(self, url: str) -> Path | None:
        return None

    def named_brokers(self, url: str) -> NamedBrokers | None:
        address = parse_kafka_url(url)
        files = (address.ca, address.cert, address.key)
        if not (address.security.startswith("sasl") or any(files)):
            return None
        is_encrypted = address.security in ("ssl", "sasl_ssl") and not address.ca
        return NamedBrokers(tuple(address.servers), address.security, is_encrypted)

    def function(self, url: str) -> str:
        return parse_kafka_url(url).token

    def check_reachable(self, url: str, wait_s: float) -> None:
        address, why = parse_kafka_url(url), ""
        for server in address.servers:
            host, _, port = server.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), wait_s).close()
            except UnicodeError:  # a part of the name is empty (`.example.com`) or too long
                why = f"{server}: this is no host's name; is a variable of the shell unset?"
            except OSError as error:
                why = f"{server}: {explain_os_error(error)}"
            else:
                return
        raise BusError(f"no broker of {address} can be reached ({why})")

    def check_client(self, url: str) -> None:
        address = parse_kafka_url(url)
        secrets = read_secrets(address, os.environ)
        try:
            from rollstream.streams.kafka.client import base_settings
        except ImportError as error:
            raise _no_client(address, error) from error
        base_settings(address, secrets)

    def open(self, url: str, clock: Callable[[], float], sync: Literal["normal", "full"]) -> "Bus":
        del sync  # the brokers' replicas keep what they acknowledged
        return self._open(url, clock, inf)

    def open_for_reading(self, url: str, folder: "ContainedFolder | None") -> "Bus":
        from rollstream.streams.connect import BusReader

        del folder
        return BusReader(self._open(url, time.time, FIRST_ANSWER_S))

    def _open(self, url: str, clock: Callable[[], float], first_answer_s: float) -> "Bus":
        address = parse_kafka_url(url)
        secrets = read_secrets(address, os.environ)
        try:
            from rollstream.streams.kafka.bus import KafkaBus
        except ImportError as error:
            raise _no_client(address, error) from error
        return KafkaBus(address, secrets, clock, first_answer_s=first_answer_s)

    def contents(self, url: str) -> LogContents:
        from rollstream.streams.kafka.removal import cluster_contents

        return cluster_contents(url)

    def remove(self, url: str, contents: LogContents) -> None:
        from rollstream.streams.kafka.removal import remove_from_cluster

        remove_from_cluster(url, contents)


def _no_client(address: object, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"{address} needs a Kafka client, and {error.name or error} is not installed; "
        "pip install 'rollstream[cloud]'"
    )
