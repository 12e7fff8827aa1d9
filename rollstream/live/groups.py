"""Which groups are open and how the others ended, as an onlooker counts them (invariants 1 and 2).

Whatever the order between topics, a group that ended is not open and is counted once. Memory is
bounded by what is open, and by `ENDED_KEPT` for telling what came too late.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream.live.numbers import NumberSet
from streams.records import Admitted, Annotation, Trajectory

ENDED_KEPT = 8192  # groups whose end is remembered with its time
OWN = "reward"  # the annotation that a sample needs only if its rollout did not judge it


@dataclass(slots=True)
class OpenGroup:
    """An admitted group; `ready_s` is when it had everything that training needs."""

    trajectories: frozenset[str]
    admitted_s: float
    finished: set[str] = field(default_factory=set[str])
    needed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """(trajectory, name) of the annotations that finished samples wait for …"""
    noted: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """… and of those that came, perhaps earlier than the sample."""
    finished_s: float | None = None
    ready_s: float | None = None

    def look(self, time_s: float) -> None:
        """Something arrived at `time_s`."""
        if len(self.finished) < len(self.trajectories):
            return
        self.finished_s = self.finished_s or time_s
        if self.needed <= self.noted:
            self.ready_s = self.ready_s or time_s


@dataclass(slots=True)
class Groups:
    """Apply records; `names` are the annotations that a sample must have before it is trained."""

    names: frozenset[str] = frozenset({OWN})
    open: dict[int, OpenGroup] = field(default_factory=dict[int, OpenGroup])
    endings: Counter[str] = field(default_factory=Counter[str])
    """`trained`, `filtered`, `expired`, `dead` → number of groups."""
    newest: int = -1
    """Highest group number admitted."""
    late: int = 0
    """Completions of groups that had ended when they were appended."""
    duplicate: int = 0
    """Second completions of a trajectory whose group was open."""
    notes: int = 0
    """Annotations."""
    late_notes: int = 0
    """Annotations of groups that had ended when they were appended."""
    _ended: NumberSet = field(default_factory=NumberSet)
    _poisoned: NumberSet = field(default_factory=NumberSet)
    _ended_s: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])

    def admit(self, record: Admitted, time_s: float) -> None:
        self.newest = max(self.newest, record.group)
        if record.group not in self._ended and record.group not in self.open:
            self.open[record.group] = OpenGroup(frozenset(record.trajectories), time_s)

    def finish(self, record: Trajectory, time_s: float, is_repeat: bool) -> None:
        """A completion; only the first of an open group changes more than a count."""
        group = self.open.get(record.group)
        if group is None and self._is_late(record.group, time_s):
            self.late += 1
        elif is_repeat or (group is not None and record.trajectory in group.finished):
            self.duplicate += 1
        elif group is not None and record.trajectory in group.trajectories:
            group.finished.add(record.trajectory)
            if record.finish != "dead":
                names = self.names if record.reward is None else self.names - {OWN}
                group.needed |= {(record.trajectory, name) for name in names}
            group.look(time_s)

    def note(self, record: Annotation, time_s: float) -> None:
        """A late fact."""
        self.notes += 1
        group = self.open.get(record.group)
        if group is None:
            self.late_notes += self._is_late(record.group, time_s)
        elif record.name in self.names and record.trajectory in group.trajectories:
            group.noted.add((record.trajectory, record.name))
            group.look(time_s)

    def end(self, group: int, how: str, time_s: float) -> None:
        """The trainer took the group or closed it."""
        self.open.pop(group, None)
        if self._ended.add(group):
            self.endings[how] += 1
            self._ended_s[group] = time_s
            if len(self._ended_s) > ENDED_KEPT:
                self._ended_s.popitem(last=False)

    def supersede(self, group: int) -> None:
        """A group that was taken is dead; of one whose take was not read only the closing counts,
        which follows. The same record twice changes nothing.
        """
        if group in self._ended and self._poisoned.add(group):
            self.endings["trained"] -= 1
            self.endings["dead"] += 1

    def ready(self) -> int:
        """Open groups that wait for nothing but the trainer."""
        return sum(group.ready_s is not None for group in self.open.values())

    def _is_late(self, group: int, time_s: float) -> bool:
        return time_s > self._ended_s.get(group, time_s)


def oldest(times_s: Iterable[float | None]) -> float | None:
    """The earliest of the times that are known."""
    return min((time_s for time_s in times_s if time_s is not None), default=None)
