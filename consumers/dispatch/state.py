"""Folds records of the log into the state of dispatch: each `apply_…` method applies one record,
and equal records give an equal state.

Repeats do no harm: in topics with a single writer they are void, the highest attempt of an
assignment wins, and a second completion only counts as late. `admissions` is read before
`trajectories`, so a completion of an unknown group is late, not early (invariant 2).

Reading list: after `consumers/dispatch/service.py`, before `consumers/dispatch/admission.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import inf

from rollstream.consumers.dispatch.kinds import SpeedReports
from rollstream.streams.admissible import is_group_full
from rollstream.streams.records import Admitted, Assignment, Partial, Prompt, RolloutStatus
from rollstream.streams.values import Address, Version

SPEED_REPORTS_SMOOTHED = 8  # reports over which a rollout's measured speed is smoothed


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    attempt: int
    rollout: str
    rollout_term: int
    moves: int
    version: Version
    at: Address | None = None
    """Its address in `assignments`; None until it is appended."""
    predicted: int = 0
    """Expected number of generated tokens in all; 0 if unknown."""
    onward: str = ""
    """The rollout that will resume the trajectory, once the present one is asked to release it."""
    given_up: bool = False
    """The rollout has released the trajectory, so no rollout generates it."""
    from_history: bool = False
    """No rollout held `version`: the assigned one first loads it from the store."""


@dataclass(frozen=True, slots=True)
class PartialChain:
    """`at` is the newest partial of the trajectory's newest attempt, with the version and the
    number of generated tokens there; `first` is the oldest one, of any attempt.
    """

    attempt: int
    at: Address
    version: Version | None
    first: Address
    generated: int = 0


@dataclass(slots=True)
class UnfinishedGroup:
    """An admitted group that is not trained, not closed and not complete."""

    admitted: Admitted
    open: set[str]
    prompt: Prompt | None = None
    finished: list[int] = field(default_factory=list[int])
    """Generated tokens of each finished trajectory, as far as this holder read them."""
    living: int = 0

    def is_full(self) -> bool:
        samples = len(self.admitted.trajectories)
        arrived = samples - len(self.open)
        return is_group_full(samples, self.admitted.needed, self.living, arrived)


@dataclass(frozen=True, slots=True)
class VoidAssignment:
    """An assignment whose group has ended, so its rollout must release the trajectory."""

    group: UnfinishedGroup
    trajectory: str
    assignment: CurrentAssignment


@dataclass(slots=True)
class TrackedRollout:
    """The newest status, and the listening time `at_s` (`SilenceClock`) of its read. A rollout that
    is not `fresh`, with a status from before this dispatch started, keeps its assignments until it
    is silent, and gets no new ones.
    """

    status: RolloutStatus
    at_s: float
    fresh: bool
    kv_peak: int = 0
    """Highest under its present version."""
    speed: float = 0.0
    """Tokens per second of one request, smoothed; 0 until the rollout has generated."""
    reports: SpeedReports = field(default_factory=SpeedReports)
    """The same by size of the batch, by which rollouts are compared (`kinds.py`)."""


@dataclass(slots=True)
class DispatchState:
    admitted: int = 0
    closed: int = 0
    trained: int = 0
    taken: dict[int, int] = field(default_factory=dict[int, int])
    """The trained groups by step, of the steps after the newest version."""
    version: Version = field(default_factory=lambda: Version(0, 0))
    next_group: int = 0
    groups: dict[int, UnfinishedGroup] = field(default_factory=dict[int, UnfinishedGroup])
    assignments: dict[str, CurrentAssignment] = field(default_factory=dict[str, CurrentAssignment])
    chains: dict[str, PartialChain] = field(default_factory=dict[str, PartialChain])
    rollouts: dict[str, TrackedRollout] = field(default_factory=dict[str, TrackedRollout])
    completed: int = 0
    late: int = 0
    released: int = 0
    """Trajectories that were not needed any more (`Admitted.needed`)."""
    stuck_timeout_s: float = inf
    """A rollout whose loop has not turned for longer is stuck, even if it sends heartbeats."""

    def apply_admitted(self, record: Admitted) -> None:
        self.admitted += 1
        self.next_group = max(self.next_group, record.group + 1)
        self.groups[record.group] = UnfinishedGroup(record, set(record.trajectories))

    def apply_assignment(self, record: Assignment, at: Address | None = None) -> None:
        """The highest attempt is in force."""
        current = self.assignments.get(record.trajectory)
        group = self.groups.get(record.group)
        if group is None or record.trajectory not in group.open:
            return
        if current is not None and record.attempt < current.attempt:
            return
        if record.kind == "release":
            self._release(record.trajectory, record.onward)
            return
        self.assignments[record.trajectory] = CurrentAssignment(
            record.attempt,
            record.rollout,
            record.rollout_term,
            record.moves,
            record.version,
            at,
            record.predicted,
            from_history=record.from_history,
        )

    def _release(self, trajectory: str, onward: str) -> None:
        current = self.assignments.pop(trajectory, None)
        # Its assignment stays until the rollout has released it.
        if current is not None and onward:
            self.assignments[trajectory] = replace(current, onward=onward)

    def apply_partial(self, record: Partial, at: Address) -> None:
        """Keep the chain of the newest attempt only."""
        trajectory, chain = record.trajectory, self.chains.get(record.trajectory)
        opened = self.groups.get(record.group)
        if opened is None or trajectory not in opened.open:
            return
        assignment = self.assignments.get(trajectory)
        if record.last and assignment is not None and assignment.attempt == record.attempt:
            # By its last partial of the attempt in force, the rollout gives the trajectory up.
            self.assignments[trajectory] = replace(assignment, given_up=True)
        newest = record.spans[-1] if record.spans else None
        # The state of an episode without a turn.
        has_state = bool(record.environment or record.failures)
        if chain is None and newest is not None:
            self.chains[trajectory] = PartialChain(
                record.attempt, at, newest.version, at, newest.end
            )
        elif chain is None and has_state and assignment is not None:
            self.chains[trajectory] = PartialChain(record.attempt, at, assignment.version, at, 0)
        # Chains never mix writers: each partial names its predecessor.
        elif chain is not None and record.attempt >= chain.attempt:
            self.chains[trajectory] = PartialChain(
                record.attempt,
                at,
                chain.version if newest is None else newest.version,
                chain.first,
                chain.generated if newest is None else newest.end,
            )

    def apply_completion(self, group: int, trajectory: str, generated: int | None = None) -> bool:
        """Ends the trajectory at its first completion; all others count as late. `generated` is the
        number of tokens, None for a dead trajectory. Returns whether the completion counts.
        """
        opened = self.groups.get(group)
        if opened is None or trajectory not in opened.open:
            self.late += 1
            return False
        self.completed += 1
        opened.open.discard(trajectory)
        self.assignments.pop(trajectory, None)
        self.chains.pop(trajectory, None)
        if generated is not None:
            opened.finished.append(generated)
            opened.living += 1
        if not opened.open:
            del self.groups[group]
        return True

    def end_if_full(self, group: int) -> list[VoidAssignment]:
        """Ends a group of which enough trajectories have ended; returns the void assignments of the
        others.
        """
        opened = self.groups.get(group)
        if opened is None or not opened.is_full():
            return []
        self.released += len(opened.open)
        return self._end(group)

    @property
    def settled(self) -> int:
        return self.trained - sum(groups for _, groups in self.unsettled)

    @property
    def unsettled(self) -> tuple[tuple[int, int], ...]:
        """The steps beyond the newest version, each with its number of groups."""
        newest = self.version.number
        return tuple(sorted((step, n) for step, n in self.taken.items() if step > newest))

    def apply_taken(self, group: int, step: int) -> list[VoidAssignment]:
        """The trainer took the group for this step; returns the void assignments."""
        self._count_taken(step, 1)
        return self._end(group)

    def apply_superseded(self, groups: int, step: int) -> None:
        """This many groups of the step are not trained after all: the trainer could not compute
        their takes. A later record closes each.
        """
        self._count_taken(step, -groups)

    def _count_taken(self, step: int, groups: int) -> None:
        self.trained += groups
        newest = self.version.number
        self.taken = {at: n for at, n in self.taken.items() if at > newest}
        if step > newest:
            self.taken[step] = self.taken.get(step, 0) + groups

    def apply_closed(self, group: int) -> list[VoidAssignment]:
        """The trainer closed the group untrained; returns the void assignments."""
        self.closed += 1
        return self._end(group)

    def _end(self, group: int) -> list[VoidAssignment]:
        opened = self.groups.pop(group, None)
        if opened is None:
            return []
        for trajectory in opened.open:
            self.chains.pop(trajectory, None)
        ended = [(t, self.assignments.pop(t, None)) for t in sorted(opened.open)]
        return [
            VoidAssignment(opened, t, assignment)
            for t, assignment in ended
            if assignment is not None
        ]

    def apply_status(self, record: RolloutStatus, now_s: float, fresh: bool = True) -> None:
        tracked = self.rollouts.get(record.rollout)
        # A zombie's status.
        if tracked is not None and record.term < tracked.status.term:
            return
        if record.stalled_s > self.stuck_timeout_s:
            if tracked is not None:
                # A stuck rollout counts as silent until its loop turns again.
                self.rollouts[record.rollout] = replace(tracked, at_s=-inf)
            return
        peak, speed = record.kv_used, tracked.speed if tracked is not None else 0.0
        reports = tracked.reports if tracked is not None else SpeedReports()
        now = (record.term, record.version)
        if tracked is not None and (tracked.status.term, tracked.status.version) == now:
            peak = max(peak, tracked.kv_peak)
        if record.running and record.tokens_per_s > 0 and not record.stalled_s:
            new = record.tokens_per_s / record.running
            speed = new if not speed else speed + (new - speed) / SPEED_REPORTS_SMOOTHED
            reports = reports.with_report(record.running, record.tokens_per_s)
        self.rollouts[record.rollout] = TrackedRollout(record, now_s, fresh, peak, speed, reports)

    def silent(self, before_s: float) -> list[str]:
        """Returns rollouts whose last status was read before this listening time, and the stuck
        ones.
        """
        return [name for name, rollout in self.rollouts.items() if rollout.at_s < before_s]

    def departed(self) -> list[str]:
        return [name for name, rollout in self.rollouts.items() if has_left(rollout.status)]

    def drop_rollouts(self, silent_before_s: float, departed: Collection[str] = ()) -> list[str]:
        """Drops rollouts without a status since `silent_before_s`, and those of `departed` that
        still are. Returns the silent ones.
        """
        departed = set(departed).intersection(self.departed())
        silent = self.silent(silent_before_s)
        for name in {*silent, *departed}:
            del self.rollouts[name]
        return [name for name in silent if name not in departed]

    def assigned_counts(self) -> dict[str, int]:
        """Returns the assigned counts by living rollout, with those that are to move to it."""
        counts: dict[str, int] = dict.fromkeys(self.rollouts, 0)
        for assignment in self.assignments.values():
            if assignment.onward in counts:
                counts[assignment.onward] += 1
            if not assignment.given_up and self.is_held(assignment):
                counts[assignment.rollout] += 1
        return counts

    def loading(self) -> dict[str, Version]:
        """Returns rollouts that first load an older version from the store (`from_history`)."""
        return {
            assignment.rollout: assignment.version
            for assignment in self.assignments.values()
            if assignment.from_history
            and not assignment.given_up
            and self.is_held(assignment)
            # A rollout that serves versions side by side loads it beside its work.
            and not (status := self.rollouts[assignment.rollout].status).versions
            and status.version != assignment.version
        }

    def group_of(self, trajectory: str) -> UnfinishedGroup:
        return self.groups[int(trajectory.rsplit(".", 1)[0])]

    def is_held(self, assignment: CurrentAssignment) -> bool:
        """Whether the assigned rollout lives, in the term of the assignment."""
        rollout = self.rollouts.get(assignment.rollout)
        return rollout is not None and rollout.status.term == assignment.rollout_term


def has_left(status: RolloutStatus) -> bool:
    """Takes no more work and has released or finished all it had."""
    return status.health == "leaving" and not status.running and not status.waiting
