"""Splits a run's time into sessions, by the supervisors' events: one begins with the first start of
a process and ends with an ending. The pause between two is not time of the run, and a process that
a new session starts is not restarted.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PAUSES_KEPT = 1024
EndedState = Literal["stopped", "failed", "finished"]
# The event by which the supervisor records the run's end → the state of the run.
ENDINGS: Mapping[str, EndedState] = {
    "complete": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class SessionPause:
    """`is_sure` is False for a supervisor that was killed: `begin_s` is then the time of its last
    event, and work may have followed it.
    """

    begin_s: float
    end_s: float
    is_sure: bool = True


@dataclass(slots=True)
class RunSessions:
    """The pauses of a run, and the first starts of each process in them. `begin_s` is the time of
    the first event, `ended_s` that of the last ending, None again after a start.
    """

    begin_s: float | None = None
    ended_s: float | None = None
    pauses: deque[SessionPause] = field(
        default_factory=lambda: deque[SessionPause](maxlen=PAUSES_KEPT)
    )
    starts: Counter[str] = field(default_factory=Counter[str])
    _last_s: float = 0.0
    _current: set[str] = field(default_factory=set[str])

    def apply(self, event: Mapping[str, Any]) -> None:
        """Applies a line of `supervisor.jsonl`; it must have a time."""
        time_s = float(event["time_s"])
        if event.get("event") in ENDINGS:
            self.ended_s = time_s
        elif event.get("event") == "start":
            self._start(str(event.get("role")), event.get("restart", 0) == 0, time_s)
        self._last_s = time_s

    def _start(self, role: str, is_first: bool, time_s: float) -> None:
        if self.begin_s is None:
            self.begin_s = time_s
        if self.ended_s is not None:
            self._pause(SessionPause(self.ended_s, time_s))
        elif is_first and role in self._current:
            # A second first start without an ending: the supervisor between them was killed.
            self._pause(SessionPause(self._last_s, time_s, is_sure=False))
        if is_first:
            self.starts[role] += 1
            self._current.add(role)

    def _pause(self, pause: SessionPause) -> None:
        self.pauses.append(pause)
        self.ended_s = None
        self._current.clear()

    def resumed(self, role: str) -> int:
        # The start by a later session is no restart.
        return max(0, self.starts[role] - 1)

    def run_s(
        self,
        begin_s: float,
        end_s: float,
        worked_s: Iterable[float] = (),
        started_s: float | None = None,
    ) -> float:
        """Returns the seconds from `begin_s` to `end_s` without the pauses. `worked_s` are times at
        which the run certainly ran, such as those of its steps; `started_s` is the begin of the
        present session, if the caller supervises it.
        """
        worked = tuple(worked_s)
        pauses = [
            (
                pause.begin_s
                if pause.is_sure
                else max([pause.begin_s, *(at for at in worked if at < pause.end_s)]),
                pause.end_s,
            )
            for pause in self.pauses
        ]
        if self.ended_s is not None:
            pauses.append((self.ended_s, max(end_s, self.ended_s)))
        if started_s is not None:
            pauses = [(a, started_s if a < started_s < b else b) for a, b in pauses]
        paused_s = sum(max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in pauses)
        return max(0.0, end_s - begin_s - paused_s)
