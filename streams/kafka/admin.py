"""Repeats requests to a Kafka cluster: a restarting broker delays one but does not fail it."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TypeVar

from rollstream.deadline import Deadline
from rollstream.errors import BusError, BusTimeout
from rollstream.os_failures import explain_os_error
from rollstream.streams.kafka.client import Admin, KafkaError
from rollstream.streams.kafka.refusals import TIME_LIMITS, explain_error, is_permanent

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 60.0  # a restarting broker is back within this time
PAUSE_S = 0.05  # before the first retry, doubled before each later one
PAUSE_S_MAX = 2.0
ADVERTISED_S = 10.0  # a broker that is killed leaves the metadata within this time
CONNECT_S = 2.0  # for all advertised addresses together, which are asked one after the other


class BrokersUnreachable(OSError):
    """A cluster answers under an address of the URL, but none of the addresses that its brokers
    advertise accepts a connection.
    """


def closed_doors(addresses: Sequence[tuple[str, int]]) -> list[str]:
    """Returns the addresses that accept no connection from here, each with the reason."""
    closed: list[str] = []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), CONNECT_S / len(addresses)).close()
        except (OSError, UnicodeError) as error:  # a host name may be one that IDNA refuses
            why = explain_os_error(error) if isinstance(error, OSError) else error
            closed.append(f"{host}:{port} ({why})")
    return closed


def call_with_retries(
    what: str, answer_s: float, once: Callable[[], T], repair: Callable[[Exception], None]
) -> T:
    """Repeats `once` while the cluster does not answer; before each repetition `repair` gets the
    error. Raises `BusTimeout` when `answer_s` have passed; at once a `BusError` of `once`, and
    `BusError` if the broker rejects the request for good, or the advertised addresses cannot be
    reached for `ADVERTISED_S`.
    """
    deadline, pause_s, advertised = Deadline(answer_s), PAUSE_S, Deadline(ADVERTISED_S)
    while True:
        try:
            return once()
        except (KafkaError, OSError) as error:
            if isinstance(error, BusError):  # a subclass of OSError, but no failure to answer
                raise
            repair(error)
            if is_permanent(error):
                raise BusError(
                    f"cannot {what}: the broker refuses it ({explain_error(error)})"
                ) from error
            if not isinstance(error, BrokersUnreachable):
                advertised = Deadline(ADVERTISED_S)
            elif advertised.passed():
                raise BusError(f"cannot {what}: {error}") from error
            if pause_s == PAUSE_S:
                why = explain_error(error)
                log.warning("cannot %s yet (%s); retried for %g s", what, why, answer_s)
            if deadline.passed():
                raise BusTimeout(
                    f"cannot {what}: no answer within {answer_s:g} s ({explain_error(error)})"
                ) from error
        time.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def create_topics(
    admin: Admin, topics: Mapping[str, tuple[int, Mapping[str, str]]], replication: int
) -> None:
    """Create topics as `Admin.create`; raises the error of the first that the cluster refuses."""
    refused = admin.create(topics, replication)
    if any(name in str(error) for error in refused.values() for name in TIME_LIMITS):
        # The cluster does not know `TIME_LIMITS`, or forbids to set them.
        unlimited = {
            name: (partitions, {k: v for k, v in configs.items() if k not in TIME_LIMITS})
            for name, (partitions, configs) in topics.items()
            if name in refused
        }
        refused = admin.create(unlimited, replication)
    for error in refused.values():
        raise error


class RetryingAdmin:
    """Threads share one client, made by `make` when needed, one request at a time. A request is
    retried for `answer_s`, until the first answer for `first_answer_s` at most.
    """

    def __init__(
        self,
        where: str,
        make: Callable[[], Admin],
        answer_s: float,
        first_answer_s: float = inf,
    ) -> None:
        self._where = where
        self._make = make
        self._answer_s = answer_s
        self._patience_s = min(answer_s, first_answer_s)
        self.retries = 0
        self.advertised: Sequence[tuple[str, int]] = ()
        self._lock = threading.RLock()
        self._admin: Admin | None = None

    def call(self, what: str, request: Callable[[Admin], T]) -> T:
        """Returns the result of `request`, which gets the client; retries and raises as
        `call_with_retries`.
        """
        with self._lock:
            what = f"{what} at {self._where}"
            answer = call_with_retries(
                what, self._patience_s, lambda: request(self._client()), self._drop
            )
            self._patience_s = self._answer_s
            return answer

    def close(self) -> None:
        with self._lock:
            admin, self._admin = self._admin, None
            if admin is not None:
                admin.close()

    def _drop(self, error: Exception) -> None:
        self.retries += 1
        # The client caches which brokers are coordinators and controller; a new one looks them up
        # again.
        self.close()

    def _client(self) -> Admin:
        if self._admin is None:
            self._admin = self._make()
            self.advertised = self._admin.advertised()
            closed = closed_doors(self.advertised)
            if closed and len(closed) == len(self.advertised):
                raise BrokersUnreachable(
                    "the cluster answers there, but its brokers advertise addresses that cannot be "
                    f"reached from here: {', '.join(closed)}; correct advertised.listeners of the "
                    "brokers, or make these hosts known and reachable here"
                )
        return self._admin
