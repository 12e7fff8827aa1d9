"""Folds the log and the metrics files of a run into its whole history, from which summaries and
charts are made.

`RunHistory` adds the facts of every step and rollout that charts need to the `RunState` of
`rollstream top`. So it grows with the run: a name and two numbers per trajectory, and more with
drafts.
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
from rollstream.streams import records
from rollstream.streams.codec import record_hash

JOINED_S = 0.05  # pauses up to this are invisible in a chart of minutes


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """States that a rollout serves a version from `time_s` (seconds since the epoch) on."""

    time_s: float
    version: int
    term: int


@dataclass(slots=True)
class RolloutHistory:
    """Holds the history of one rollout over all its terms: the times in which it generated, the
    versions that it served, its idle seconds, its trajectories by finish and its tokens.
    """

    busy: Intervals = field(default_factory=lambda: Intervals(JOINED_S))
    serving: list[ServedVersion] = field(default_factory=list[ServedVersion])
    idle_by_term: dict[int, float] = field(default_factory=dict[int, float])
    finishes: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0

    def idle_s(self) -> float:
        """Returns the idle seconds that the rollout counted, over all terms."""
        return sum(self.idle_by_term.values())


DROPPED_MIN = 40
"""If the spread is half of the mean, the median of 40 lengths errs by 1.25 · 0.5 / √40 = 10 %."""
SHARE_MIN = 0.02
"""Share of the trained samples: fewer dropped samples hardly affect learning."""
DIFFERENCE_MIN = 0.1  # as a share of the trained samples' median


@dataclass(slots=True)
class SampleStats:
    """Holds the numbers of generated tokens and the known rewards of dropped or trained samples."""

    lengths: "array[float]" = field(default_factory=lambda: array("f"))
    rewards: "array[float]" = field(default_factory=lambda: array("f"))

    def add(self, record: records.Trajectory) -> None:
        self.lengths.append(len(record.logprobs))
        if record.reward is not None:
            self.rewards.append(record.reward)


@dataclass(frozen=True, slots=True)
class DropComparison:
    """Compares counts and medians of dropped and trained samples; None for a median of no
    values.
    """

    dropped: int
    trained: int
    length_dropped: float | None
    length_trained: float | None
    reward_dropped: float | None
    reward_trained: float | None


@dataclass(slots=True)
class DroppedSamples:
    """Sorts samples into dropped and trained ones. Apply the whole ledger first, then the first
    completion of each trajectory.

    Dropping samples by lag or at a deadline is a bias, mostly against long answers
    (docs/explanation/scheduling.md), so length and reward of dropped samples are compared with
    those of trained ones. A sample counts as dropped if the trainer left it out of a trained group
    in a step that counts dropped samples, or if it finished in an expired group. Dead trajectories
    are neither dropped nor trained; late rewards (annotations) are ignored.
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
                if record.counts.get("dropped"):  # otherwise they died or have no reward
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


def drop_bias_warnings(found: DropComparison) -> Iterator[RunWarning]:
    """Yields a warning if a median of dropped and trained samples differs by more than a tenth.
    Yields none if few samples were dropped, in number or as a share of the trained ones.
    """
    if found.dropped < max(DROPPED_MIN, SHARE_MIN * found.trained):
        return
    pairs = (
        ("length", found.length_dropped, found.length_trained, "{:.0f}"),
        ("reward", found.reward_dropped, found.reward_trained, "{:.3g}"),
    )
    differ = [
        f"{name} {form.format(dropped)} against {form.format(trained)}"
        for name, dropped, trained, form in pairs
        if dropped is not None and trained is not None
        if abs(dropped - trained) > DIFFERENCE_MIN * abs(trained)
    ]
    if differ:
        yield RunWarning(
            "dropped_bias",
            f"{found.dropped} answers dropped for age differ from the {found.trained} trained: "
            f"median {' and '.join(differ)}",
            "a larger dispatch.max_lag or more rollouts drop fewer",
        )


def _median(values: "array[float]") -> float | None:
    return float(median(values)) if values else None


@dataclass(slots=True)
class DraftHistory:
    """Sums up drafted tokens by group from the first completions that carry draft statistics. A
    group's pass over the prompts is the number of groups with the same prompt up to it, so tasks
    need not record their passes.
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
        """Returns the totals by pass and task, in ascending order."""
        found: dict[tuple[int, str], DraftTotals] = {}
        came: dict[str, int] = {}
        for _, (prompt, task, guesses) in sorted(self._groups.items()):
            number = came[prompt] = came.get(prompt, 0) + 1
            found[number, task] = found.get((number, task), DraftTotals()) + guesses
        return [PassDrafts(number, task, found[number, task]) for number, task in sorted(found)]


def _prompt_hash(record: records.Trajectory) -> str:
    """Returns the hash of the prompt's tokens, which precede the first token of another source."""
    others = np.flatnonzero(record.sources != records.PROMPT)
    end = int(others[0]) if len(others) else len(record.tokens)
    return record_hash(record.tokens[:end].tobytes())


@dataclass(slots=True)
class RunHistory:
    """Holds the whole history of a run. `configuration` maps dotted keys to values, `events` are
    the supervisor's events, `concerns` the warnings at the newest record, and `reasons` counts why
    groups and trajectories were not trained.
    """

    state: RunState = field(default_factory=RunState)
    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])
    forked_from: str = ""
    warmup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    moves: Sequence[RequestMove] = ()
    """Repack moves between rollouts."""
    concerns: Sequence[RunWarning] = ()
    steps: dict[int, records.StepDone] = field(default_factory=dict[int, records.StepDone])
    announced: dict[int, records.WeightsAnnounced] = field(
        default_factory=dict[int, records.WeightsAnnounced]
    )
    rollouts: dict[str, RolloutHistory] = field(default_factory=dict[str, RolloutHistory])
    reasons: Counter[str] = field(default_factory=Counter[str])
    dropped: DroppedSamples = field(default_factory=DroppedSamples)
    drafted: DraftHistory = field(default_factory=DraftHistory)
    _completed: set[str] = field(default_factory=set[str])

    def apply(self, record: records.Record, time_s: float = 0.0) -> None:
        """Apply one record, also to `state`. A step repeated after a crash replaces its earlier
        record.
        """
        self.state.apply(record, time_s)
        self.extend(record)

    def extend(self, record: records.Record) -> None:
        """Apply one record that `state` has applied already."""
        if not isinstance(record, records.Trajectory):
            self.dropped.apply(record)
        match record:
            case records.StepDone():
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
        """Returns the number of admitted groups by ending; the counts add up (invariant 1)."""
        return self.state.groups.outcomes()

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

    def _trajectory(self, record: records.Trajectory) -> None:
        rollout = self._rollout(record.rollout)
        rollout.busy.add(record.started_s, record.finished_s)
        rollout.finishes[record.finish] += 1
        rollout.tokens += len(record.logprobs)
        if record.trajectory not in self._completed:  # only the first completion counts
            self._completed.add(record.trajectory)
            self.dropped.apply(record)
            self.drafted.apply(record)
        if record.finish == "dead":
            self.reasons[f"trajectory dead: {record.reason or 'no reason given'}"] += 1
