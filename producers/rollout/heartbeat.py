"""The thread that sends a rollout's `status` records, so that a busy loop is not a silent process.

It is the only sender of `status` in the process, so no two records are reordered: it publishes what
the loop hands over and, while the loop hands over nothing (it swaps weights, recomputes a cache,
waits for the log), repeats the last record with `stalled_s`. `end` publishes the last record of all
and joins the thread: no repeat can follow a status that says `leaving` with nothing left.

A stopped process (SIGSTOP), or native code that never releases the interpreter lock, stops this
thread too and looks dead. A deadlocked loop does not: its `stalled_s` grows, and dispatch decides.
"""

import logging
import threading
import time
from collections.abc import Callable

from producers.rollout.pulse import Repeats
from streams.bus import Bus
from streams.records import RolloutStatus
from streams.writer import publish_all

log = logging.getLogger(__name__)

WAITING_MAX = 64  # statuses while the log does not answer; an older one is worth less than a newer


class Heartbeat:
    """Threads may share it; what fails in its thread is raised by the next `send` or `end`."""

    def __init__(
        self,
        bus: Bus,
        every_s: float,
        timer: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._timer, self._clock = bus, timer, clock
        self._changed = threading.Condition()
        self._repeats = Repeats(every_s, timer())
        self._waiting: list[RolloutStatus] = []
        self._ended = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def turned(self) -> None:
        """The loop came round."""
        self._repeats.turned_s = self._timer()

    def send(self, record: RolloutStatus) -> None:
        """Publish it soon, after those before it; returns at once."""
        with self._changed:
            self._check()
            assert not self._ended, "a status after the last one"
            self._waiting = [*self._waiting[1 - WAITING_MAX :], record]
            self._changed.notify_all()

    def end(self) -> None:
        """All that was sent is durable and nothing follows when this returns."""
        self.close()
        self._thread.join()
        self._check()

    def close(self) -> None:
        """End the thread after what was sent; harmless to call twice."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while records := self._next():
                publish_all(self._bus, "status", [(f"{r.rollout}/{r.term}", r) for r in records])
        except Exception as error:
            log.exception("the rollout's status cannot be published")
            self._failed = error

    def _next(self) -> list[RolloutStatus]:
        """What is to be published now, as soon as there is something; [] once all is."""
        with self._changed:
            while True:
                now = self._timer()
                wait_s = self._repeats.wait_s(now)
                if self._waiting:
                    records, self._waiting = self._waiting, []
                    self._repeats.sent(records[-1], now)
                    return records
                if self._ended:
                    return []
                if wait_s == 0:
                    return [self._repeats.repeat(now, self._clock())]
                self._changed.wait(wait_s)
