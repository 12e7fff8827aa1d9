"""Repeats cluster requests until the cluster answers: a failed client is closed and replaced, with
growing pauses up to a deadline.
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
PAUSE_S = 0.05
PAUSE_S_MAX = 2.0


def call_with_retries(
    what: str, answer_s: float, once: Callable[[], T], repair: Callable[[Exception], None]
) -> T:
    """Return the result of `once`, retried after `repair` while the cluster does not answer.

    Raises `BusTimeout` after `answer_s`, and `BusError` at once if the broker rejects the request.
    """
    deadline, pause_s = Deadline(answer_s), PAUSE_S
    while True:
        try:
            return once()
        except (KafkaError, OSError) as error:
            if isinstance(error, BusError):
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
    """Keeps one admin client at a time, which threads share."""

    def __init__(self, where: str, make: Callable[[], Admin], answer_s: float) -> None:
        self._where = where
        self._make = make
        self._answer_s = answer_s
        self._lock = threading.RLock()
        self._admin: Admin | None = None

    def call(self, what: str, request: Callable[[Admin], T]) -> T:
        """Return the result of `request`, retried as in `call_with_retries`."""
        with self._lock:
            what = f"{what} at {self._where}"
            return call_with_retries(
                what, self._answer_s, lambda: request(self._client()), self._drop
            )

    def close(self) -> None:
        with self._lock:
            admin, self._admin = self._admin, None
            if admin is not None:
                admin.close()

    def _drop(self, error: Exception) -> None:
        """Close the failed client. It caches coordinators and controllers, which a new client looks
        up again.
        """
        self.close()

    def _client(self) -> Admin:
        if self._admin is None:
            self._admin = self._make()
        return self._admin
