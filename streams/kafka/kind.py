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

from rollstream.contained_folder import ContainedFolder
from rollstream.deadline import Deadline
from rollstream.errors import BusError, ConfigurationError, LeaseHeld
from rollstream.os_failures import explain_os_error
from rollstream.streams.bus import Bus
from rollstream.streams.connect import BusReader
from rollstream.streams.kafka.address import parse_kafka_url, read_secrets
from rollstream.streams.kind import LogContents, NamedBrokers
from rollstream.streams.removal import own_groups, own_topics

if TYPE_CHECKING:
    from rollstream.streams.kafka.admin import RetryingAdmin

FIRST_ANSWER_S = 5.0
"""A reader waits so long for the first answer of brokers: a wrong URL, or a host that is no broker,
should fail soon.
"""
GONE_S = 60.0
"""Longest wait for deleted topics to leave the listing; brokers take seconds."""


class KafkaKind:
    """Implements `BusKind` for `kafka://` URLs."""

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

    def open(self, url: str, clock: Callable[[], float], sync: Literal["normal", "full"]) -> Bus:
        del sync  # the brokers' replicas keep what they acknowledged
        return self._open(url, clock, inf)

    def open_for_reading(self, url: str, folder: ContainedFolder | None) -> Bus:
        del folder
        return BusReader(self._open(url, time.time, FIRST_ANSWER_S))

    def _open(self, url: str, clock: Callable[[], float], first_answer_s: float) -> Bus:
        address = parse_kafka_url(url)
        secrets = read_secrets(address, os.environ)
        try:
            from rollstream.streams.kafka.bus import KafkaBus
        except ImportError as error:
            raise _no_client(address, error) from error
        return KafkaBus(address, secrets, clock, first_answer_s=first_answer_s)

    def contents(self, url: str) -> LogContents:
        """Raises `LeaseHeld` if a consumer group has members."""
        prefix = parse_kafka_url(url).prefix
        admin = _admin(url)
        try:
            present = admin.call("list topics", lambda a: a.topic_names())
            named = admin.call("list consumer groups", lambda a: a.group_names())
            topics, groups = own_topics(prefix, present), own_groups(prefix, present, named)
            members = admin.call("look up members", lambda a: a.members(groups))
            if busy := [name for name, count in members.items() if count]:
                raise LeaseHeld(
                    f"consumer groups of the run have members ({', '.join(busy)}); "
                    "stop those programs"
                )
            sizes = admin.call("look up sizes", lambda a: a.log_bytes(topics)) if topics else {}
        finally:
            admin.close()
        return LogContents(str(parse_kafka_url(url)), topics, groups, sum(sizes.values()))

    def remove(self, url: str, contents: LogContents) -> None:
        """Raises `BusError` if the brokers keep some."""
        admin = _admin(url)
        try:
            groups, topics = contents.groups, contents.topics
            left = admin.call("delete consumer groups", lambda a: a.delete_groups(groups))
            if left:
                raise BusError(f"cannot delete consumer groups at {contents.where}: {left}")
            admin.call("delete topics", lambda a: a.delete_topics(topics))
            deadline = Deadline(GONE_S)
            while set(topics) & set(admin.call("list topics", lambda a: a.topic_names())):
                if deadline.passed():
                    raise BusError(
                        f"{contents.where}: topics are still listed {GONE_S:.0f} s after their "
                        "deletion; is delete.topic.enable set on the brokers?"
                    )
                time.sleep(0.1)
        finally:
            admin.close()


def _no_client(address: object, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"{address} needs a Kafka client, and {error.name or error} is not installed; "
        "pip install 'rollstream[cloud]'"
    )


def _admin(url: str) -> "RetryingAdmin":
    from rollstream.streams.kafka.admin import ANSWER_S, RetryingAdmin
    from rollstream.streams.kafka.client import Admin, base_settings

    address = parse_kafka_url(url)
    settings = base_settings(address, read_secrets(address, os.environ))
    return RetryingAdmin(str(address), lambda: Admin(settings), ANSWER_S)
