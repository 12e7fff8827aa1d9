"""Repeats failed S3 requests. One whose response was lost, or was a server error, may have taken
effect (`in_doubt`): the store examines the object before it reports another writer.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from rollstream.deadline import Deadline
from rollstream.errors import ObjectMissing, StoreError, StoreTimeout
from rollstream.storage.stores.s3.advice import advice


class FailureKind(Enum):
    MISSING = auto()  # no object has this key
    PRECONDITION = auto()  # If-Match or If-None-Match did not hold
    CONFLICT = auto()  # another write of the key was under way: retry
    RANGE = auto()  # the range begins at or after the object's end
    NO_UPLOAD = auto()  # the multipart upload was completed, aborted or collected
    IN_THE_WAY = auto()  # an object or a folder (perhaps being removed) has the key: retry
    TRANSIENT = auto()  # unreachable, overloaded or cut off: retry
    REFUSED = auto()  # a retry gives the same response


class S3Failure(Exception):
    """One failed request: the server's `code` and `text`, and the HTTP `status` (0 without a
    response). With `in_doubt` it may have taken effect. It never leaves `storage/`.
    """

    def __init__(
        self, kind: FailureKind, code: str, text: str, in_doubt: bool, status: int = 0
    ) -> None:
        super().__init__(f"{code}: {text}")
        self.kind, self.code, self.text, self.in_doubt = kind, code, text, in_doubt
        self.status = status


_WRITES = frozenset({"write", "create", "swap", "delete"})
_CODES = {
    "NoSuchKey": FailureKind.MISSING,
    "NoSuchUpload": FailureKind.NO_UPLOAD,
    "PreconditionFailed": FailureKind.PRECONDITION,
    "InvalidRange": FailureKind.RANGE,
    "ConditionalRequestConflict": FailureKind.CONFLICT,
    "OperationAborted": FailureKind.CONFLICT,
    "ObjectParentIsFile": FailureKind.IN_THE_WAY,
    "ExistingObjectIsDirectory": FailureKind.IN_THE_WAY,
    "RequestTimeout": FailureKind.TRANSIENT,  # a 400: the body did not arrive in time
    "SlowDown": FailureKind.TRANSIENT,
    "ServiceUnavailable": FailureKind.TRANSIENT,
    "XAmzContentSHA256Mismatch": FailureKind.TRANSIENT,  # damaged in transit; it was not stored
    "BadDigest": FailureKind.TRANSIENT,
    "IncompleteBody": FailureKind.TRANSIENT,
}
_STATUSES = {
    412: FailureKind.PRECONDITION,
    416: FailureKind.RANGE,
    429: FailureKind.TRANSIENT,
    408: FailureKind.TRANSIENT,
}


def classify_failure(status: int, code: str, message: str) -> S3Failure:
    """`code` and `message` are in the response's body. A retried server error (5xx) is in doubt."""
    kind = _CODES.get(code) or _STATUSES.get(status)
    if kind is None and code == "404":
        kind = FailureKind.TRANSIENT  # S3 servers always send a code: this response was cut off
    if kind is None:
        kind = (
            FailureKind.TRANSIENT
            if status >= 500 and code != "NotImplemented"
            else FailureKind.REFUSED
        )
    in_doubt = kind is FailureKind.TRANSIENT and status >= 500
    return S3Failure(kind, code, message, in_doubt, status)


@contextmanager
def translate_s3_errors(action: str, where: str) -> Generator[None]:
    """Turn an `S3Failure` into `ObjectMissing`, `StoreTimeout` for a kind that is retried until the
    deadline, else `StoreError`, with advice.
    """
    try:
        yield
    except S3Failure as failure:
        cause = f"cannot {action} {where}: {failure.code} ({failure.text.strip().rstrip('.')})"
        if failure.kind is FailureKind.MISSING:
            raise ObjectMissing(f"no object {where}") from failure
        if failure.kind in (FailureKind.TRANSIENT, FailureKind.CONFLICT):
            raise StoreTimeout(
                f"{cause}, until its deadline; {advice(failure.code, failure.status)} "
                "(deadline_s=… in the store's URL tolerates a longer outage)"
                + ("; it may have taken effect" if failure.in_doubt and action in _WRITES else "")
            ) from failure
        raise StoreError(f"{cause}; {advice(failure.code, failure.status)}") from failure


PAUSE_S_FIRST, PAUSE_S_MAX = 0.05, 2.0
CONNECT_S_MAX = 5.0  # the system asks again after 1 and 3 s, then waits ever longer after a cut
SILENCE_S_MAX = 20.0  # one of eight parallel parts of 16 MiB takes this long at 0.8 MB/s
BLOCKED_MAX = 4  # VersityGW reports IN_THE_WAY also for a folder that a concurrent delete empties
SLOWEST_BYTES_S = 8 << 20  # a large object gets size / this rate more than `deadline_s`
RETRIED_KINDS = frozenset({FailureKind.TRANSIENT, FailureKind.CONFLICT})

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Requests begin within the first `begin_s` of `deadline_s` seconds; each may take `connect_s`
    to connect, and then wait `silence_s` without a byte, so the last one still ends in time.
    """

    begin_s: float
    connect_s: float
    silence_s: float


def time_limits(deadline_s: float) -> TimeLimits:
    """Returns a quarter of the deadline for each limit, at most `CONNECT_S_MAX` for connecting and
    `SILENCE_S_MAX` for waiting; the rest is for beginning requests.
    """
    connect_s = min(CONNECT_S_MAX, deadline_s / 4)
    silence_s = min(SILENCE_S_MAX, deadline_s / 4)
    return TimeLimits(deadline_s - connect_s - silence_s, connect_s, silence_s)


def allowance_s(begin_s: float, size: int) -> float:
    """Returns the seconds within which an operation on `size` bytes may begin requests."""
    return begin_s + size / SLOWEST_BYTES_S


def pause_s(failures: int, draw: float) -> float:
    """Returns a pause between half and all of the longest pause, which doubles up to `PAUSE_S_MAX`;
    `draw` in [0, 1) spreads the clients.
    """
    longest = min(PAUSE_S_MAX, PAUSE_S_FIRST * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + draw / 2)


class Attempts:
    """Repeats the requests of one operation until `deadline`. `in_doubt` is set once a failed one
    may have taken effect.
    """

    def __init__(
        self,
        deadline: Deadline,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.deadline = deadline
        self.in_doubt = False
        self._failures = 0
        self._draw, self._sleep = draw, sleep

    def run(self, step: Callable[[], _T], retried: Collection[FailureKind] = RETRIED_KINDS) -> _T:
        """`step` is repeated while it fails with a kind in `retried` and time is left; on
        `IN_THE_WAY` only within the first `BLOCKED_MAX` failures. Raises the last `S3Failure`.
        """
        while True:
            try:
                return step()
            except S3Failure as failure:
                self.in_doubt |= failure.in_doubt
                blocked = failure.kind is FailureKind.IN_THE_WAY and self._failures < BLOCKED_MAX
                if failure.kind not in retried and not blocked:
                    raise
                self.wait(failure)

    def wait(self, failure: S3Failure) -> None:
        """Pause before the next attempt; raise the failure if no time is left for one."""
        self._failures += 1
        if self._failures == 3:  # logged once; fewer failures are ordinary
            remaining_s = self.deadline.remaining_s()
            _log.warning("object store: %s; retrying for %.0f s", failure, remaining_s)
        pause = pause_s(self._failures, self._draw())
        self._sleep(min(pause, self.deadline.remaining_s()))
        if self.deadline.passed():
            failure.in_doubt = self.in_doubt
            raise failure
