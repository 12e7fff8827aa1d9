"""Repeats failed requests to a Kafka cluster, with growing pauses, until the cluster answers or a
deadline passes. So a restarting broker delays a request but does not fail it.

`call_with_retries` is the loop for any request. `RetryingAdmin` uses it for requests of an admin
client (topics, their offsets, positions of consumer groups), and replaces a client that failed.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rollstream.deadline import Deadline
from rollstream.errors import BusError, BusTimeout
from rollstream.streams.kafka.client import Admin, KafkaError, is_permanent

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 60.0  # a restarting broker is back within this time
PAUSE_S = 0.05  # before the first retry, doubled before each later one
PAUSE_S_MAX = 2.0


def call_with_retries(
    what: str, answer_s: float, once: Callable[[], T], repair: Callable[[Exception], None]
) -> T:
    """Return the result of `once`. While it fails because the cluster does not answer, call
    `repair` with the error, pause, and call `once` again. `what` names the request in errors.

    Raises `BusTimeout` when `answer_s` have passed. Raises at once a `BusError` of `once`, and
    `BusError` if the broker rejects the request for good.
    """
    deadline, pause_s = Deadline(answer_s), PAUSE_S
    while True:
        try:
            return once()
        except (KafkaError, OSError) as error:
            if isinstance(error, BusError):  # a subclass of OSError, but no failure to answer
                raise
            repair(error)
            if isinstance(error, KafkaError) and is_permanent(error):
                raise BusError(f"cannot {what}: the broker refuses it ({error})") from error
            if pause_s == PAUSE_S:
                log.warning("cannot %s yet (%s); retried for %g s", what, error, answer_s)
            if deadline.passed():
                raise BusTimeout(
                    f"cannot {what}: no answer within {answer_s:g} s ({error}); check that the "
                    "brokers run and can be reached, and the security settings of the URL"
                ) from error
        time.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


class RetryingAdmin:
    """Sends administrative requests through one client, made by `make` when one is needed; threads
    share it, one request at a time. A failed client is closed, and the retry uses a new one.
    `where` names the cluster in errors. `retries` counts the failures.
    """

    def __init__(self, where: str, make: Callable[[], Admin], answer_s: float) -> None:
        self._where = where
        self._make = make
        self._answer_s = answer_s
        self.retries = 0
        self._lock = threading.RLock()
        self._admin: Admin | None = None

    def call(self, what: str, request: Callable[[Admin], T]) -> T:
        """Return the result of `request`, which gets the client; retries and raises as
        `call_with_retries` does. `what` names the request in errors.
        """
        with self._lock:
            what = f"{what} at {self._where}"
            return call_with_retries(
                what, self._answer_s, lambda: request(self._client()), self._drop
            )

    def close(self) -> None:
        """Close the client; a later call makes a new one."""
        with self._lock:
            admin, self._admin = self._admin, None
            if admin is not None:
                admin.close()

    def _drop(self, error: Exception) -> None:
        """Close the failed client: it caches which brokers are coordinators and controller, and a
        new client looks them up again.
        """
        self.retries += 1
        self.close()

    def _client(self) -> Admin:
        if self._admin is None:
            self._admin = self._make()
        return self._admin
