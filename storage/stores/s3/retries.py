"""When a failed request is sent again: exponential pauses with jitter under one deadline.

botocore's own retries are off: they know neither the operation's deadline nor whether an earlier
request is in doubt, and would multiply with these.
"""

import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from rollstream.deadline import Deadline
from rollstream.storage.stores.s3.errors import FailureKind, S3Failure

PAUSE_S_FIRST, PAUSE_S_MAX = 0.05, 2.0
SILENCE_S_MAX = 20.0  # one part of 16 MiB at 0.8 MB/s, with eight parts in parallel
BLOCKED_MAX = 4  # VersityGW also reports a folder that a concurrent delete is emptying
SLOWEST_BYTES_S = 8 << 20  # adds size / this rate to `deadline_s` of a large object
RETRIED_KINDS = frozenset({FailureKind.TRANSIENT, FailureKind.CONFLICT})

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How `deadline_s` is divided: an operation that sent its last request at `begin_s` still ends
    in time, because connecting and silence have limits of their own.
    """

    begin_s: float
    connect_s: float
    silence_s: float


def time_limits(deadline_s: float) -> TimeLimits:
    """The time in which requests may start, the time to connect, and the time without any bytes."""
    quarter = min(SILENCE_S_MAX, deadline_s / 4)
    return TimeLimits(deadline_s - 2 * quarter, quarter, quarter)


def allowance_s(begin_s: float, size: int) -> float:
    """Seconds in which requests of an operation on `size` bytes may start."""
    return begin_s + size / SLOWEST_BYTES_S


def pause_s(failures: int, draw: float) -> float:
    """The pause after so many failures; `draw` in [0, 1) spreads clients over half of it."""
    longest = min(PAUSE_S_MAX, PAUSE_S_FIRST * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + draw / 2)


class Attempts:
    """The requests of one operation. `in_doubt` is set once one of them may have taken effect
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
        """The result of `step`, retried while its failure is transient and time is left."""
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
