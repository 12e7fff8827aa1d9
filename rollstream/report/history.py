"""The history of a run, folded from its log and metrics files; input of summaries and charts.

Groups are counted by their endings (invariant 1): every admitted group is trained, filtered,
expired, dead, or open.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.monitor.moves import RequestMove
from rollstream.monitor.snapshot import RunWarning
from rollstream.report.drafts import DraftHistory
from rollstream.report.dropped import DroppedSamples
from rollstream.streams.records import (
    Admitted,
    Applied,
    GroupClosed,
    Record,
    RolloutStatus,
    StepDone,
    Superseded,
    Take,
    Trajectory,
    WeightsAnnounced,
)


@dataclass(slots=True)
class BusyIntervals:
    """Disjoint intervals in order; gaps of up to `joined_s` seconds are closed."""

    joined_s: float = 0.0
    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])

    def add(self, start_s: float, end_s: float) -> None:
        """Add `[start_s, end_s]`; memory grows with the gaps, not with the added intervals."""
        first = bisect_left(self.ends, start_s - self.joined_s)
        last = bisect_right(self.starts, end_s + self.joined_s)
        if first < last:
            start_s = min(start_s, self.starts[first])
            end_s = max(end_s, self.ends[last - 1])
        self.starts[first:last] = [start_s]
        self.ends[first:last] = [end_s]

    def within(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Yields the intervals' parts inside `[start_s, end_s]`."""
        for index in range(bisect_right(self.ends, start_s), len(self.starts)):
            if self.starts[index] >= end_s:
                return
            yield max(start_s, self.starts[index]), min(end_s, self.ends[index])


GROUP_ENDINGS = ("trained", "filtered", "expired", "dead")
JOINED_S = 0.05  # pauses up to this are invisible in a chart of minutes


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A rollout serves this version from `time_s` on."""

    time_s: float
    version: int
    term: int


@dataclass(slots=True)
class RolloutHistory:
    """One rollout, by name, over all its terms."""

    busy: BusyIntervals = field(default_factory=lambda: BusyIntervals(JOINED_S))
    serving: list[ServedVersion] = field(default_factory=list[ServedVersion])
    idle_by_term: dict[int, float] = field(default_factory=dict[int, float])
    finishes: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0

    def idle_s(self) -> float:
        """Returns the idle seconds that the rollout counted, over all terms."""
        return sum(self.idle_by_term.values())


@dataclass(slots=True)
class RunHistory:
    """`configuration` maps dotted keys to values; `events` are the supervisor's events."""

    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])
    forked_from: str = ""
    warmup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    moves: Sequence[RequestMove] = ()
    """Repack moves between rollouts."""
    concerns: Sequence[RunWarning] = ()
    steps: dict[int, StepDone] = field(default_factory=dict[int, StepDone])
    announced: dict[int, WeightsAnnounced] = field(default_factory=dict[int, WeightsAnnounced])
    rollouts: dict[str, RolloutHistory] = field(default_factory=dict[str, RolloutHistory])
    admitted: set[int] = field(default_factory=set[int])
    ended: dict[str, set[int]] = field(
        default_factory=lambda: {name: set() for name in GROUP_ENDINGS}
    )
    reasons: Counter[str] = field(default_factory=Counter[str])
    dropped: DroppedSamples = field(default_factory=DroppedSamples)
    drafted: DraftHistory = field(default_factory=DraftHistory)

    def apply(self, record: Record) -> None:
        """Apply one record. A step repeated after a crash replaces its earlier record."""
        self.dropped.apply(record)
        self.drafted.apply(record)
        match record:
            case StepDone():
                self.steps[record.step] = record
            case Take(groups=groups):
                self.ended["trained"].update(members.group for members in groups)
            case Superseded():  # `GroupClosed` records that follow count its groups as dead
                self.ended["trained"].difference_update(record.poisoned)
            case GroupClosed():
                self.ended[record.reason].add(record.group)
                self.reasons[f"{record.reason}: {record.detail or 'no detail'}"] += 1
            case Admitted():
                self.admitted.add(record.group)
            case Applied():
                serving = ServedVersion(record.time_s, record.version.number, record.rollout_term)
                self._rollout(record.rollout).serving.append(serving)
            case Trajectory():
                self._trajectory(record)
            case RolloutStatus():
                idle = self._rollout(record.rollout).idle_by_term
                idle[record.term] = max(record.idle_s, idle.get(record.term, 0.0))
            case WeightsAnnounced():
                self.announced[record.version.number] = record
            case _:
                pass

    def outcomes(self) -> dict[str, int]:
        """Returns the number of admitted groups by ending; the counts add up (invariant 1)."""
        counts = {name: len(self.ended[name]) for name in GROUP_ENDINGS}
        return {
            "admitted": len(self.admitted),
            **counts,
            "open": len(self.admitted.difference(*self.ended.values())),
        }

    def span_s(self) -> tuple[float, float] | None:
        """Returns the times of the first and the last event, in seconds since the epoch."""
        times = [done.time_s for done in self.steps.values()]
        for rollout in self.rollouts.values():
            times += rollout.busy.starts[:1] + rollout.busy.ends[-1:]
            times += [serving.time_s for serving in rollout.serving]
        return (min(times), max(times)) if times else None

    def deaths(self) -> list[Mapping[str, Any]]:
        """Returns the supervisor's death events."""
        return [event for event in self.events if event.get("event") == "death"]

    def metric(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) of a metric for every step that has it."""
        return [
            (float(step), done.metrics[name])
            for step, done in sorted(self.steps.items())
            if name in done.metrics
        ]

    def evaluated(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) of a metric for every evaluation that has it."""
        lines = (line for line in self.evaluations if line.get(name) is not None)
        return sorted((float(line["step"]), float(line[name])) for line in lines)

    def _rollout(self, name: str) -> RolloutHistory:
        return self.rollouts.setdefault(name, RolloutHistory())

    def _trajectory(self, record: Trajectory) -> None:
        rollout = self._rollout(record.rollout)
        rollout.busy.add(record.started_s, record.finished_s)
        rollout.finishes[record.finish] += 1
        rollout.tokens += len(record.logprobs)
        if record.finish == "dead":
            self.reasons[f"trajectory dead: {record.reason or 'no reason given'}"] += 1
