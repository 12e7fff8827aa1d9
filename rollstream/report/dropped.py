"""Compares length and reward of samples dropped for their age with those of trained samples.

Dropping by lag or at a deadline is a bias, mostly against long answers
(docs/explanation/scheduling.md). A sample counts as dropped if the rule of a trained group left it
out, or if it finished in an expired group. Dead trajectories are neither dropped nor trained.
Memory grows with the run: a name and two numbers per trajectory. Late rewards (annotations) are
ignored.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from rollstream.monitor.snapshot import RunWarning
from rollstream.streams.records import GroupClosed, Record, StepDone, Take, Trajectory

DROPPED_MIN = 40
"""If the spread is half of the mean, the median of 40 lengths errs by 1.25 · 0.5 / √40 = 10 %."""
SHARE_MIN = 0.02
"""Share of the trained samples: fewer dropped ones hardly affect learning."""
DIFFERENCE_MIN = 0.1


@dataclass(slots=True)
class SampleStats:
    """Numbers of generated tokens, and the known rewards, of one kind of samples."""

    lengths: "array[float]" = field(default_factory=lambda: array("f"))
    rewards: "array[float]" = field(default_factory=lambda: array("f"))

    def add(self, record: Trajectory) -> None:
        self.lengths.append(len(record.logprobs))
        if record.reward is not None:
            self.rewards.append(record.reward)


@dataclass(frozen=True, slots=True)
class DropComparison:
    """Counts and medians of dropped and trained samples; None for the median of no values."""

    dropped: int
    trained: int
    length_dropped: float | None
    length_trained: float | None
    reward_dropped: float | None
    reward_trained: float | None


@dataclass(slots=True)
class DroppedSamples:
    """Folds records; apply the whole ledger before the trajectories."""

    dropped: SampleStats = field(default_factory=SampleStats)
    trained: SampleStats = field(default_factory=SampleStats)
    _used: set[str] = field(default_factory=set[str])
    _left_out: set[str] = field(default_factory=set[str])
    _members: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    _expired: set[int] = field(default_factory=set[int])
    _seen: set[str] = field(default_factory=set[str])

    def apply(self, record: Record) -> None:
        match record:
            case Take():
                self._used.update(member.trajectory for member in record.members)
                taken = self._members.setdefault(record.step, set())
                taken.update(m.trajectory for group in record.groups for m in group.members)
            case StepDone():
                taken = self._members.pop(record.step, set())
                if record.counts.get("dropped"):  # otherwise they died or have no reward
                    self._left_out |= taken - self._used
            case GroupClosed(reason="expired"):
                self._expired.add(record.group)
            case Trajectory() if record.finish != "dead":
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

    def _finished(self, record: Trajectory) -> None:
        name = record.trajectory
        if name in self._seen:  # only the first completion counts
            return
        self._seen.add(name)
        if name in self._used:
            self.trained.add(record)
        elif name in self._left_out or record.group in self._expired:
            self.dropped.add(record)


def drop_bias_warnings(found: DropComparison) -> Iterator[RunWarning]:
    """Yields a warning if a median differs by more than a tenth. Yields none if few samples were
    dropped, in number or as a share of the trained ones.
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
