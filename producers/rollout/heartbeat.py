"""The thread that sends a rollout's `status` records, so that a rollout with a busy loop does not
look dead.

This thread is the only sender of `status` in the process, so records stay in order. It publishes
what the loop hands over. While the loop hands over nothing (it swaps weights, recomputes a cache,
waits for the log), the thread repeats the last record with `stalled_s`. `end` publishes the last
record and joins the thread, so no repeat can follow a `leaving` status.

A stopped process (SIGSTOP), or native code that never releases the interpreter lock, stops this
thread too, and the rollout looks dead. A deadlocked loop does not stop it: `stalled_s` grows, and
dispatch decides.
"""

import logging
import threading
import time
from collections.abc import Callable

from rollstream.producers.rollout.pulse import StatusRepeats
from rollstream.streams.bus import Bus
from rollstream.streams.records import RolloutStatus
from rollstream.streams.writer import publish_all

log = logging.getLogger(__name__)

WAITING_MAX = 64  # queued while the log does not answer; the oldest ones are dropped first


class Heartbeat:
    """Threads may share it. A failure in its thread is raised by the next `send` or `end`."""

    def __init__(
        self,
        bus: Bus,
        every_s: float,
        timer: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._timer, self._clock = bus, timer, clock
        self._changed = threading.Condition()
        self._repeats = StatusRepeats(every_s, timer())
        self._waiting: list[RolloutStatus] = []
        self._ended = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def note_iteration(self) -> None:
        """Note that the loop has started another iteration."""
        self._repeats.iterated_s = self._timer()

    def send(self, record: RolloutStatus) -> None:
        """Queue the record behind earlier ones; returns at once."""
        with self._changed:
            self._check()
            assert not self._ended, "a status after the last one"
            self._waiting = [*self._waiting[1 - WAITING_MAX :], record]
            self._changed.notify_all()

    def end(self) -> None:
        """Return when every queued record is durable and no further one can follow."""
        self.close()
        self._thread.join()
        self._check()

    def close(self) -> None:
        """End the thread after the queued records. Idempotent."""
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
        """Wait until records are due and return them; [] after the last one."""
        with self._changed:
            while True:
                now = self._timer()
                wait_s = self._repeats.wait_s(now)
                if self._waiting:
                    records, self._waiting = self._waiting, []
                    self._repeats.note_sent(records[-1], now)
                    return records
                if self._ended:
                    return []
                if wait_s == 0:
                    return [self._repeats.repeat(now, self._clock())]
                self._changed.wait(wait_s)
