"""Which groups are open and how the others ended (invariants 1 and 2). Topics may be read in any
order: an ended group is counted once and not opened again, except a poisoned one. Memory is bounded
by the open groups, the gaps between ended ones, and `ENDED_KEPT`.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollstream.storage.archive.run_rules import ENDINGS
from rollstream.streams.admissible import is_group_full
from rollstream.streams.records import Admitted, Annotation, Trajectory


@dataclass(slots=True)
class Intervals:
    """Disjoint, ascending; those with a gap of at most `joined` become one."""

    joined: float = 0
    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])

    def add(self, start: float, end: float) -> None:
        first = bisect_left(self.ends, start - self.joined)
        last = bisect_right(self.starts, end + self.joined)
        if first < last:
            start = min(start, self.starts[first])
            end = max(end, self.ends[last - 1])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]

    def within(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        for index in range(bisect_right(self.ends, start), len(self.starts)):
            if self.starts[index] >= end:
                return
            yield max(start, self.starts[index]), min(end, self.ends[index])


@dataclass(slots=True)
class NumberSet:
    """A set of whole numbers; its memory grows with the gaps between them."""

    # Groups end nearly in order, so the gaps are few.
    held: Intervals = field(default_factory=Intervals)

    def add(self, number: int) -> bool:
        if number in self:
            return False
        self.held.add(number, number + 1)
        return True

    def __contains__(self, number: int) -> bool:
        return any(self.held.within(number, number + 1))

    def __len__(self) -> int:
        return int(sum(self.held.ends) - sum(self.held.starts))


# Groups whose end time shows whether a later record came late.
ENDED_KEPT = 8192
# An annotation of this name is needed only if the sample carries no reward.
OWN_REWARD = "reward"


@dataclass(slots=True)
class WatchedGroup:
    """`finished_s` is the time at which all trajectories of an open group had finished, `ready_s`
    that at which the annotations that they need had arrived too; None before.
    """

    trajectories: frozenset[str]
    admitted_s: float
    finished: set[str] = field(default_factory=set[str])
    needed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """(trajectory, name) that finished samples need."""
    annotated: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """(trajectory, name) that arrived, possibly before their sample."""
    finished_s: float | None = None
    ready_s: float | None = None
    enough: int = 0
    """`Admitted.needed`: so many living trajectories complete the group; 0: all."""
    living: int = 0

    def is_full(self) -> bool:
        """Whether no further completion of the group counts."""
        return is_group_full(len(self.trajectories), self.enough, self.living, len(self.finished))

    def update(self, time_s: float) -> None:
        if not self.is_full():
            return
        self.finished_s = self.finished_s or time_s
        if self.needed <= self.annotated:
            self.ready_s = self.ready_s or time_s


@dataclass(slots=True)
class GroupTracker:
    """Applies record by record. `names` are the annotations without which training cannot use a
    sample. Times (`time_s`) are those of the append.
    """

    names: frozenset[str] = frozenset({OWN_REWARD})
    admitted: NumberSet = field(default_factory=NumberSet)
    open: dict[int, WatchedGroup] = field(default_factory=dict[int, WatchedGroup])
    endings: Counter[str] = field(default_factory=Counter[str])
    newest: int = -1
    late: int = 0
    """Completions appended after their group had ended."""
    duplicate: int = 0
    surplus: int = 0
    """Completions of open groups that were complete without them."""
    annotations: int = 0
    late_annotations: int = 0
    _ended: NumberSet = field(default_factory=NumberSet)
    _poisoned: NumberSet = field(default_factory=NumberSet)
    _reopened: set[int] = field(default_factory=set[int])
    _ended_s: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])

    def admit(self, record: Admitted, time_s: float) -> None:
        self.newest = max(self.newest, record.group)
        self.admitted.add(record.group)
        if record.group not in self._ended and record.group not in self.open:
            names = frozenset(record.trajectories)
            self.open[record.group] = WatchedGroup(names, time_s, enough=record.needed)

    def finish(self, record: Trajectory, time_s: float, is_repeat: bool) -> None:
        """`is_repeat`: the caller has seen another completion of this trajectory."""
        group = self.open.get(record.group)
        if group is None and self._is_late(record.group, time_s):
            self.late += 1
        elif is_repeat or (group is not None and record.trajectory in group.finished):
            # Only a trajectory's first completion changes an open group.
            self.duplicate += 1
        elif group is not None and group.is_full():
            self.surplus += 1
        elif group is not None and record.trajectory in group.trajectories:
            group.finished.add(record.trajectory)
            if record.finish != "dead":
                group.living += 1
                names = self.names if record.reward is None else self.names - {OWN_REWARD}
                group.needed |= {(record.trajectory, name) for name in names}
            group.update(time_s)

    def annotate(self, record: Annotation, time_s: float) -> None:
        """It may arrive before its completion."""
        self.annotations += 1
        group = self.open.get(record.group)
        if group is None:
            self.late_annotations += self._is_late(record.group, time_s)
        elif record.name in self.names and record.trajectory in group.trajectories:
            group.annotated.add((record.trajectory, record.name))
            group.update(time_s)

    def end(self, group: int, how: str, time_s: float) -> None:
        """`how` is one of `ENDINGS`. Idempotent."""
        self.open.pop(group, None)
        if group in self._reopened:
            self._reopened.remove(group)
            self.endings[how] += 1
        elif self._ended.add(group):
            self.endings[how] += 1
            self._ended_s[group] = time_s
            if len(self._ended_s) > ENDED_KEPT:
                self._ended_s.popitem(last=False)

    def supersede(self, group: int) -> None:
        """Undoes the ending `trained` of a poisoned group, whose take the learner could not
        compute; open until its `GroupClosed` record, which follows. Idempotent.
        """
        if group in self._ended and self._poisoned.add(group):
            self.endings["trained"] -= 1
            self._reopened.add(group)

    def outcomes(self) -> dict[str, int]:
        """Returns admitted groups, groups by ending, and open groups. Once all records are read,
        endings and open groups add up to the admitted ones (invariant 1).
        """
        ended = {ending: self.endings[ending] for ending in ENDINGS}
        is_open = len(self.open) + len(self._reopened)
        return {"admitted": len(self.admitted), **ended, "open": is_open}

    def ready(self) -> int:
        return sum(group.ready_s is not None for group in self.open.values())

    def _is_late(self, group: int, time_s: float) -> bool:
        return time_s > self._ended_s.get(group, time_s)


def oldest(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)
