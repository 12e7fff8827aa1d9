"""Turns a failed request into a value with advice for people, and decides when it is sent again.

`in_doubt` is the central field: a request that may have reached the server may have taken effect,
whatever its response was. Retries pause exponentially with jitter under one deadline. botocore's
own retries are off: they respect neither the operation's deadline nor an earlier request in doubt,
and would multiply with these.
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


class FailureKind(Enum):
    """States how an operation continues after a failed request."""

    MISSING = auto()  # no object has this key
    PRECONDITION = auto()  # If-Match or If-None-Match did not hold
    CONFLICT = auto()  # another write of the key was under way: retry
    RANGE = auto()  # the range begins at or after the object's end
    NO_UPLOAD = auto()  # the multipart upload was completed, aborted or collected
    IN_THE_WAY = auto()  # an object or a folder (perhaps being removed) has the key: retry
    TRANSIENT = auto()  # unreachable, overloaded or cut off: retry
    REFUSED = auto()  # a retry gives the same response


class S3Failure(Exception):
    """One request failed, with the server's `code` and `text`; this never leaves `storage/`."""

    def __init__(self, kind: FailureKind, code: str, text: str, in_doubt: bool) -> None:
        super().__init__(f"{code}: {text}")
        self.kind, self.code, self.text, self.in_doubt = kind, code, text, in_doubt


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

_CREDENTIALS = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role"
)
_REGION = "the bucket is in another region: name it with region=… in the store's URL"
_ADVICE = {
    "NoSuchBucket": "create the bucket or correct its name in the store's URL",
    "AccessDenied": "the policy of these credentials lacks a permission that "
    "docs/reference/s3.md lists "
    "(without s3:ListBucket even a missing object looks denied)",
    "AllAccessDisabled": "the account or bucket is closed",
    "NoCredentials": f"no credentials were found: {_CREDENTIALS}",
    "InvalidAccessKeyId": _CREDENTIALS,
    "XAdminUserNotFound": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": f"the credentials have expired: {_CREDENTIALS}",
    "InvalidToken": _CREDENTIALS,
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "Certificate": "the endpoint's certificate is not trusted: set AWS_CA_BUNDLE to its authority",
    "ObjectParentIsFile": "an object is in the way: a key cannot be the folder of another",
    "ExistingObjectIsDirectory": "a folder is in the way: a key cannot be the folder of another",
    "QuotaExceeded": "the store is full: free space and start again",
    "NotImplemented": "this server lacks what the store needs (docs/reference/s3.md lists it)",
}


def classify_failure(status: int, code: str, message: str) -> S3Failure:
    """Return the failure for an HTTP response; `code` is the error code in its body."""
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
    return S3Failure(kind, code, message, in_doubt)


def advice(code: str) -> str:
    """Return advice for a refused request."""
    return _ADVICE.get(code, "nothing acknowledged was lost")


@contextmanager
def translate_s3_errors(action: str, where: str) -> Generator[None]:
    """Raise an `S3Failure` of the block as the project's typed error, with advice."""
    try:
        yield
    except S3Failure as failure:
        cause = f"cannot {action} {where}: {failure.code} ({failure.text.strip().rstrip('.')})"
        if failure.kind is FailureKind.MISSING:
            raise ObjectMissing(f"no object {where}") from failure
        if failure.kind in (FailureKind.TRANSIENT, FailureKind.CONFLICT):
            raise StoreTimeout(
                f"{cause}, until its deadline; check that the endpoint is up and can be reached "
                "from here (deadline_s=… in the store's URL tolerates a longer outage)"
                + ("; it may have taken effect" if failure.in_doubt and action in _WRITES else "")
            ) from failure
        raise StoreError(f"{cause}; {advice(failure.code)}") from failure


PAUSE_S_FIRST, PAUSE_S_MAX = 0.05, 2.0
SILENCE_S_MAX = 20.0  # one part of 16 MiB at 0.8 MB/s, with eight parts in parallel
BLOCKED_MAX = 4  # VersityGW also reports a folder that a concurrent delete is emptying
SLOWEST_BYTES_S = 8 << 20  # adds size / this rate to `deadline_s` of a large object
RETRIED_KINDS = frozenset({FailureKind.TRANSIENT, FailureKind.CONFLICT})

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Divides `deadline_s`: an operation that sent its last request at `begin_s` still ends in
    time, because connecting (`connect_s`) and waiting for bytes (`silence_s`) have limits of their
    own.
    """

    begin_s: float
    connect_s: float
    silence_s: float


def time_limits(deadline_s: float) -> TimeLimits:
    """Return the limits for starting requests, for connecting and for waiting without bytes."""
    quarter = min(SILENCE_S_MAX, deadline_s / 4)
    return TimeLimits(deadline_s - 2 * quarter, quarter, quarter)


def allowance_s(begin_s: float, size: int) -> float:
    """Return the seconds in which requests of an operation on `size` bytes may start."""
    return begin_s + size / SLOWEST_BYTES_S


def pause_s(failures: int, draw: float) -> float:
    """Return the pause after so many failures; `draw` in [0, 1) spreads clients over half of it."""
    longest = min(PAUSE_S_MAX, PAUSE_S_FIRST * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + draw / 2)


class Attempts:
    """Sends the requests of one operation. `in_doubt` is set once one of them may have taken effect
    without a response.
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

    def run(self, step: Callable[[], _T], again: Collection[FailureKind] = RETRIED_KINDS) -> _T:
        """Return the result of `step`, which is repeated while it fails with a kind in `again` (an
        object in the way: a few times) and time is left.
        """
        while True:
            try:
                return step()
            except S3Failure as failure:
                self.in_doubt |= failure.in_doubt
                blocked = failure.kind is FailureKind.IN_THE_WAY and self._failures < BLOCKED_MAX
                if failure.kind not in again and not blocked:
                    raise
                self.wait(failure)

    def wait(self, failure: S3Failure) -> None:
        """Pause before the next attempt; raise the failure if no time is left for one."""
        self._failures += 1
        if self._failures == 3:  # logged once; fewer failures are ordinary
            left = self.deadline.remaining_s()
            _log.warning("object store: %s; retrying for %.0f s", failure, left)
        pause = pause_s(self._failures, self._draw())
        self._sleep(min(pause, self.deadline.remaining_s()))
        if self.deadline.passed():
            failure.in_doubt = self.in_doubt
            raise failure
