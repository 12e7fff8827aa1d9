"""The whole history of a run from log and metrics files, from which the report is made, without
I/O. It grows by a name and two numbers per trajectory, and more with drafts.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from rollstream.monitor.groups import Intervals
from rollstream.monitor.samples import DraftTotals, PassDrafts, draft_totals_of
from rollstream.monitor.snapshot import RunWarning
from rollstream.monitor.state import RequestMove, RunState
from rollstream.report.failures import SHARE_MIN, EpisodeHistory, differing
from rollstream.streams import records
from rollstream.streams.codec import record_hash

# Shorter pauses of a rollout are invisible in a chart of minutes.
JOINED_S = 0.05


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A rollout, in its `term`, serves a version from `time_s` (seconds since the epoch) on."""

    time_s: float
    version: int
    term: int


@dataclass(slots=True)
class RolloutHistory:
    """One rollout over all its terms. `busy` are the times in which it generated."""

    busy: Intervals = field(default_factory=lambda: Intervals(JOINED_S))
    serving: list[ServedVersion] = field(default_factory=list[ServedVersion])
    idle_by_term: dict[int, float] = field(default_factory=dict[int, float])
    finishes: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0

    def idle_s(self) -> float:
        return sum(self.idle_by_term.values())


# Fewer dropped samples give no warning: if the spread is half of the mean, the median of 40 lengths
# errs by 1.25 · 0.5 / √40 = 10 %.
DROPPED_MIN = 40


@dataclass(slots=True)
class SampleStats:
    lengths: "array[float]" = field(default_factory=lambda: array("f"))
    rewards: "array[float]" = field(default_factory=lambda: array("f"))

    def add(self, record: records.Trajectory) -> None:
        self.lengths.append(len(record.logprobs))
        if record.reward is not None:
            self.rewards.append(record.reward)


@dataclass(frozen=True, slots=True)
class DropComparison:
    """Dropped samples against trained ones: their numbers, and the medians of their lengths and
    rewards, None of no values.
    """

    dropped: int
    trained: int
    length_dropped: float | None
    length_trained: float | None
    reward_dropped: float | None
    reward_trained: float | None


@dataclass(slots=True)
class DroppedSamples:
    """Sorts samples into dropped and trained ones. The ledger must be applied first, because it
    decides which they are, then the first completion of each trajectory.

    Samples are dropped because of their lag or at a group's deadline. That is a bias, mostly
    against long answers (docs/explanation/scheduling.md). A sample counts as dropped if its group
    expired, or was trained without it in a step whose record counts dropped samples. Dead
    trajectories are neither; late rewards are ignored.
    """

    dropped: SampleStats = field(default_factory=SampleStats)
    trained: SampleStats = field(default_factory=SampleStats)
    _used: set[str] = field(default_factory=set[str])
    _left_out: set[str] = field(default_factory=set[str])
    _members: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    _expired: set[int] = field(default_factory=set[int])

    def apply(self, record: records.Record) -> None:
        match record:
            case records.Take():
                self._used.update(member.trajectory for member in record.members)
                taken = self._members.setdefault(record.step, set())
                taken.update(m.trajectory for group in record.groups for m in group.members)
            case records.StepDone():
                taken = self._members.pop(record.step, set())
                # Otherwise they died or have no reward.
                if record.counts.get("dropped"):
                    self._left_out |= taken - self._used
            case records.GroupClosed(reason="expired"):
                self._expired.add(record.group)
            case records.Trajectory() if record.finish != "dead":
                self._finished(record)
            case _:
                pass

    def compared(self) -> DropComparison:
        return DropComparison(
            len(self.dropped.lengths),
            len(self.trained.lengths),
            _median(self.dropped.lengths),
            _median(self.trained.lengths),
            _median(self.dropped.rewards),
            _median(self.trained.rewards),
        )

    def _finished(self, record: records.Trajectory) -> None:
        if record.trajectory in self._used:
            self.trained.add(record)
        elif record.trajectory in self._left_out or record.group in self._expired:
            self.dropped.add(record)


def drop_bias_warnings(drops: DropComparison) -> Iterator[RunWarning]:
    if drops.dropped < max(DROPPED_MIN, SHARE_MIN * drops.trained):
        return
    pairs = (
        ("length", drops.length_dropped, drops.length_trained, "{:.0f}"),
        ("reward", drops.reward_dropped, drops.reward_trained, "{:.3g}"),
    )
    if differ := differing(pairs):
        yield RunWarning(
            "dropped_bias",
            f"{drops.dropped} answers dropped for age differ from the {drops.trained} trained: "
            f"median {' and '.join(differ)}",
            "a larger dispatch.max_lag or more rollouts drop fewer",
        )


def _median(values: "array[float]") -> float | None:
    return float(median(values)) if values else None


@dataclass(slots=True)
class DraftHistory:
    """Sums up draft statistics by task and pass over the prompts: a later pass has more earlier
    answers to draft from. Only the first completion of each trajectory is to be applied.
    """

    _groups: dict[int, tuple[str, str, DraftTotals]] = field(
        default_factory=dict[int, tuple[str, str, DraftTotals]]
    )
    """The prompt's hash, the task and the totals of each group."""

    def apply(self, record: records.Trajectory) -> None:
        guesses = draft_totals_of(record)
        if guesses is None:
            return
        if record.group in self._groups:
            prompt, task, before = self._groups[record.group]
            self._groups[record.group] = (prompt, task, before + guesses)
        else:
            self._groups[record.group] = (_prompt_hash(record), record.task, guesses)

    def passes(self) -> list[PassDrafts]:
        """Returns the totals of each pass and task, in ascending order of both."""
        totals: dict[tuple[int, str], DraftTotals] = {}
        came: dict[str, int] = {}
        for _, (prompt, task, guesses) in sorted(self._groups.items()):
            # Records do not name the pass: the first group of a prompt is of pass 1, its second of
            # pass 2.
            number = came[prompt] = came.get(prompt, 0) + 1
            totals[number, task] = totals.get((number, task), DraftTotals()) + guesses
        return [PassDrafts(number, task, totals[number, task]) for number, task in sorted(totals)]


def _prompt_hash(record: records.Trajectory) -> str:
    others = np.flatnonzero(record.sources != records.PROMPT)
    end = int(others[0]) if len(others) else len(record.tokens)
    return record_hash(record.tokens[:end].tobytes())


@dataclass(slots=True)
class RunHistory:
    """Holds the whole history of a run. Records are applied with the ledger before the trajectories
    (`DroppedSamples`).

    `configuration` maps dotted keys to values, `warmup` is the content of `warmup.json`,
    `evaluations` and `events` are the lines of `eval.jsonl` and `supervisor.jsonl`, `concerns` the
    warnings at the newest record. `steps` and `announced` have the newest record of each step and
    version number.
    """

    state: RunState = field(default_factory=RunState)
    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])
    forked_from: str = ""
    warmup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    moves: Sequence[RequestMove] = ()
    concerns: Sequence[RunWarning] = ()
    steps: dict[int, records.StepDone] = field(default_factory=dict[int, records.StepDone])
    announced: dict[int, records.WeightsAnnounced] = field(
        default_factory=dict[int, records.WeightsAnnounced]
    )
    rollouts: dict[str, RolloutHistory] = field(default_factory=dict[str, RolloutHistory])
    reasons: Counter[str] = field(default_factory=Counter[str])
    dropped: DroppedSamples = field(default_factory=DroppedSamples)
    drafted: DraftHistory = field(default_factory=DraftHistory)
    episodes: EpisodeHistory = field(default_factory=EpisodeHistory)
    _completed: set[str] = field(default_factory=set[str])

    def extend(self, record: records.Record) -> None:
        """Apply one record to all but `state`, which the caller has applied it to."""
        if not isinstance(record, records.Trajectory):
            self.dropped.apply(record)
            self.episodes.apply(record)
        match record:
            case records.StepDone():
                # A step that is repeated after a crash replaces the earlier one.
                self.steps[record.step] = record
            case records.GroupClosed():
                self.reasons[f"{record.reason}: {record.detail or 'no detail'}"] += 1
            case records.Applied():
                serving = ServedVersion(record.time_s, record.version.number, record.rollout_term)
                self._rollout(record.rollout).serving.append(serving)
            case records.Trajectory():
                self._trajectory(record)
            case records.RolloutStatus():
                idle = self._rollout(record.rollout).idle_by_term
                idle[record.term] = max(record.idle_s, idle.get(record.term, 0.0))
            case records.WeightsAnnounced():
                self.announced[record.version.number] = record
            case _:
                pass

    def outcomes(self) -> dict[str, int]:
        """Returns the numbers of admitted groups, of groups by ending, and of open groups; the
        latter add up to the admitted ones (invariant 1).
        """
        return self.state.groups.outcomes()

    def span_s(self) -> tuple[float, float] | None:
        """Returns the times of the first and the last step, trajectory or served version, in
        seconds since the epoch; None if there is none.
        """
        times = [done.time_s for done in self.steps.values()]
        for rollout in self.rollouts.values():
            times += rollout.busy.starts[:1] + rollout.busy.ends[-1:]
            times += [serving.time_s for serving in rollout.serving]
        return (min(times), max(times)) if times else None

    def deaths(self) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event.get("event") == "death"]

    def metric(self, name: str) -> list[tuple[float, float]]:
        return [
            (float(step), done.metrics[name])
            for step, done in sorted(self.steps.items())
            if name in done.metrics
        ]

    def evaluated(self, name: str) -> list[tuple[float, float]]:
        lines = (line for line in self.evaluations if line.get(name) is not None)
        return sorted((float(line["step"]), float(line[name])) for line in lines)

    def _rollout(self, name: str) -> RolloutHistory:
        return self.rollouts.setdefault(name, RolloutHistory())

    def _trajectory(self, record: records.Trajectory) -> None:
        rollout = self._rollout(record.rollout)
        rollout.busy.add(record.started_s, record.finished_s)
        rollout.finishes[record.finish] += 1
        rollout.tokens += len(record.logprobs)
        # Only the first completion counts.
        if record.trajectory not in self._completed:
            self._completed.add(record.trajectory)
            self.dropped.apply(record)
            self.episodes.apply(record)
            self.drafted.apply(record)
        if record.finish == "dead":
            self.reasons[f"trajectory dead: {record.reason or 'no reason given'}"] += 1
