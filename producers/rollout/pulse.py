"""When a status record is due, and the speed, idle time and previous KV use that it reports; when
the last record is repeated because the loop is busy.
"""

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from rollstream.streams.records import RolloutStatus

Health = Literal["starting", "generating", "draining", "pulling", "leaving"]


@dataclass(slots=True)
class StatusSchedule:
    """A status is due every `every_s` seconds and at every change of health. Times are the caller's
    clock.
    """

    every_s: float
    sent_s: float = 0.0
    health: Health = "starting"
    tokens: int = 0
    idle_s: float = 0.0
    checked_s: float = 0.0
    kv_reports: tuple[tuple[float, int], ...] = ()
    """(time, KV used) of the newest reports, oldest first."""

    def is_due(self, health: Health, busy: bool, now_s: float) -> bool:
        """Whether a status is due. The time between two calls counts as idle if nothing ran."""
        if self.checked_s and not busy:
            self.idle_s += now_s - self.checked_s
        self.checked_s = now_s
        return health != self.health or now_s - self.sent_s >= self.every_s

    def note_sent(self, health: Health, tokens: int, now_s: float) -> float:
        """Note that a status is sent now; returns tokens per second since the previous one."""
        speed = (tokens - self.tokens) / max(1e-3, now_s - self.sent_s) if self.sent_s else 0.0
        self.sent_s, self.health, self.tokens = now_s, health, tokens
        return speed

    def previous_kv(self, kv_used: int, now_s: float) -> int:
        """Note the KV use reported now; returns that of the report before (for the first report,
        its own).

        A change of health sends two reports in quick succession. A report younger than half a
        heartbeat is not used for comparison.
        """
        earlier = [kv for at_s, kv in self.kv_reports if now_s - at_s >= self.every_s / 2]
        if not self.kv_reports or now_s - self.kv_reports[-1][0] >= self.every_s / 2:
            self.kv_reports = (*self.kv_reports[-1:], (now_s, kv_used))
        return earlier[-1] if earlier else self.kv_reports[0][1]


@dataclass(slots=True)
class StatusRepeats:
    """Repeats the last status while the loop sends none. A repeat is due two intervals after the
    last status, because a healthy loop sends one after each. Pure; times are the caller's monotonic
    clock.
    """

    every_s: float
    iterated_s: float
    last: RolloutStatus | None = None
    sent_s: float = 0.0

    def note_sent(self, record: RolloutStatus, now_s: float) -> None:
        """Note that the loop's record was published."""
        self.last, self.sent_s = record, now_s

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next repeat, 0 when it is due; None before the first status."""
        return None if self.last is None else max(0.0, self.sent_s + 2 * self.every_s - now_s)

    def repeat(self, now_s: float, time_s: float) -> RolloutStatus:
        """The last status as of `time_s` (wall clock), with the seconds since the loop's last
        iteration.
        """
        assert self.last is not None, "nothing to repeat before the first status"
        self.sent_s = now_s
        return replace(self.last, time_s=time_s, stalled_s=max(0.0, now_s - self.iterated_s))
