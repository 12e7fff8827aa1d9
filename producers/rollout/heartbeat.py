"""A thread sends the heartbeats: while the loop passes no status, it repeats the last one, with the
time since the loop's last iteration (`stalled_s`).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from rollstream.streams.bus import Bus
from rollstream.streams.records import RolloutStatus
from rollstream.streams.writer import KeyedRecord, append_encoded, encode_each

Health = Literal["starting", "generating", "draining", "pulling", "leaving"]
log = logging.getLogger(__name__)
WAITING_MAX = 64  # most records queued while the log does not answer; the oldest are dropped


@dataclass(slots=True)
class StatusSchedule:
    """A status is due every `every_s` seconds, and at every change of health. All times are of one
    clock.
    """

    every_s: float
    sent_s: float = 0.0
    health: Health = "starting"
    tokens: int = 0
    idle_s: float = 0.0
    checked_s: float = 0.0
    kv_reports: tuple[tuple[float, int], ...] = ()
    """(time, KV use) of the two newest reports at least half of `every_s` apart, oldest first."""

    def is_due(self, health: Health, busy: bool, now_s: float) -> bool:
        """Unless `busy`, the time since the last call is idle."""
        if self.checked_s and not busy:
            self.idle_s += now_s - self.checked_s
        self.checked_s = now_s
        return health != self.health or now_s - self.sent_s >= self.every_s

    def note_sent(self, health: Health, tokens: int, now_s: float) -> float:
        """Notes a status, after `tokens` in all; returns the tokens per second since the previous
        one.
        """
        speed = (tokens - self.tokens) / max(1e-3, now_s - self.sent_s) if self.sent_s else 0.0
        self.sent_s, self.health, self.tokens = now_s, health, tokens
        return speed

    def previous_kv(self, kv_used: int, now_s: float) -> int:
        """Returns the previous report's KV use, the first time its own."""
        # At a change of health two reports follow each other quickly, so the previous one is at
        # least half of `every_s` old.
        earlier = [kv for at_s, kv in self.kv_reports if now_s - at_s >= self.every_s / 2]
        if not self.kv_reports or now_s - self.kv_reports[-1][0] >= self.every_s / 2:
            self.kv_reports = (*self.kv_reports[-1:], (now_s, kv_used))
        return earlier[-1] if earlier else self.kv_reports[0][1]


@dataclass(slots=True)
class StatusRepeats:
    """Repeats the last status 2 · `every_s` after the last record: a loop that makes progress sends
    one every `every_s`. Times are of one monotonic clock.
    """

    every_s: float
    iterated_s: float
    last: RolloutStatus | None = None
    sent_s: float = 0.0

    def note_sent(self, record: RolloutStatus, now_s: float) -> None:
        self.last, self.sent_s = record, now_s

    def wait_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next repeat: 0 when due, None before the first status."""
        return None if self.last is None else max(0.0, self.sent_s + 2 * self.every_s - now_s)

    def repeat(self, now_s: float, time_s: float) -> RolloutStatus:
        """Returns the last status at `time_s` (wall clock), with the seconds since the loop's last
        iteration as `stalled_s`.
        """
        assert self.last is not None, "nothing to repeat before the first status"
        self.sent_s = now_s
        return replace(self.last, time_s=time_s, stalled_s=max(0.0, now_s - self.iterated_s))


class Heartbeat:
    """Publishes status records in order, in a thread of its own; threads may share this object. If
    its thread fails, the next `send` or `end` raises the error.

    A loop that deadlocks does not stop the thread: `stalled_s` grows until dispatch drops the
    rollout. A stopped process (SIGSTOP), or native code that holds the interpreter lock, stops it
    too, and the rollout looks dead.
    """

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
        self._repeats.iterated_s = self._timer()

    def send(self, record: RolloutStatus) -> None:
        """Queue the record behind earlier ones and return at once."""
        with self._changed:
            self._check()
            assert not self._ended, "a status after the last one"
            self._waiting = [*self._waiting[1 - WAITING_MAX :], record]
            self._changed.notify_all()

    def end(self) -> None:
        """Returns once every record is durable: no repeat follows the last status."""
        self.close()
        self._thread.join()
        self._check()

    def close(self) -> None:
        """Make the thread end after the queued records, without waiting for it. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while records := self._next():
                self._publish(records)
        except Exception as error:
            log.exception("the rollout's status cannot be published")
            self._failed = error

    def _publish(self, records: list[RolloutStatus]) -> None:
        keyed: list[KeyedRecord] = [(f"{r.rollout}/{r.term}", r) for r in records]
        # One odd value must not make the rollout look dead: its record is left out.
        entries, refused = encode_each(self._bus, "status", keyed)
        for reason in refused.values():
            log.error("a status of the rollout is refused: %s", reason)
        append_encoded(self._bus, "status", entries)

    def _next(self) -> list[RolloutStatus]:
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
