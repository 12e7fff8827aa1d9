"""Decides when to repack (to move the last running requests together, `repack.py`), builds the
planners' inputs from the state, and turns their plan into releases.

A move is three records: dispatch's release names the destination (`onward`), the source's last
partial gives the trajectory up, and the next attempt resumes from that partial. All three are in
the log, so a death at any point is recovered like any other: a source by its heartbeat, a
destination by a new placement, dispatch by reading the releases and last partials. A completion
that arrives first ends the trajectory and drops its pending move (invariant 2).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rollstream.consumers.dispatch.assignments import release_record
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.repack import (
    OutlierPlan,
    RepackMove,
    RolloutLoad,
    RunningRequest,
    StepDuration,
    lag_budget,
    plan_outliers,
    plan_repack,
)
from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState, TrackedRollout
from rollstream.streams.records import Assignment
from rollstream.streams.values import Version

MOVE_TIMEOUT_S = 10.0  # to wait for a move's last partial: an answer that is being scored has none


@dataclass(frozen=True, slots=True)
class MoveSummary:
    """Counts the requests that `source` was asked to release for `destination`."""

    source: str
    destination: str
    requests: int


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Holds the releases to append; the trajectories `restarts` restart on the newest version."""

    releases: tuple[Assignment, ...] = ()
    restarts: tuple[str, ...] = ()
    moves: tuple[RepackMove, ...] = ()

    def summaries(self) -> tuple[MoveSummary, ...]:
        """Returns the releases counted by source and destination, whole tails and gathered outliers
        together.
        """
        counts = Counter((release.rollout, release.onward) for release in self.releases)
        return tuple(MoveSummary(*both, count) for both, count in sorted(counts.items()))


@dataclass(slots=True)
class RepackPlanner:
    """Plans moves every `every_s` seconds, and at once after a new version that rollouts do not
    hold yet.
    """

    every_s: float
    max_lag: int | None
    groups_per_wave: int
    _due_s: float = 0.0
    _version: Version | None = None
    _asked_s: dict[str, float] = field(default_factory=dict[str, float])
    _steps: StepDuration = field(default_factory=StepDuration)

    def plan(self, state: DispatchState, lengths: LengthHistory, now_s: float) -> RepackPlan | None:
        """Returns the moves that are due now; None while none are due."""
        self._steps.observe(state.version.number, now_s)
        if now_s < self._due_s and state.version == self._version:
            return None
        self._due_s, self._version = now_s + self.every_s, state.version
        if all(s.status.version.number >= state.version.number for s in state.rollouts.values()):
            return RepackPlan()  # every rollout holds the newest version
        loads = self._loads(state, now_s)
        moves = plan_repack(loads)
        giving = {move.source: move.destination for move in moves}
        apart = [load for load in loads if load.rollout not in {*giving, *giving.values()}]
        gathered = self._gather(state, lengths, apart)
        onward = dict(gathered.moves)
        for trajectory, assignment in state.assignments.items():
            if assignment.rollout in giving and is_generating(state, trajectory, assignment):
                onward[trajectory] = giving[assignment.rollout]
        self._asked_s |= dict.fromkeys(onward, now_s)
        return RepackPlan(tuple(_move_releases(state, onward)), gathered.restarts, moves)

    def _loads(self, state: DispatchState, now_s: float) -> list[RolloutLoad]:
        """Returns the load of every rollout; one in the middle of a move is not ready until the
        move is done or `MOVE_TIMEOUT_S` is over.
        """
        for trajectory, assignment in state.assignments.items():
            if assignment.onward:
                self._asked_s.setdefault(trajectory, now_s)  # released by an earlier holder
        self._asked_s = {t: at_s for t, at_s in self._asked_s.items() if t in state.assignments}
        moving: set[str] = set()
        silent: dict[str, int] = {}
        for trajectory, assignment in state.assignments.items():
            if not state.is_held(assignment):
                continue
            if assignment.onward and now_s - self._asked_s[trajectory] < MOVE_TIMEOUT_S:
                moving |= {assignment.rollout, assignment.onward}
            if not assignment.onward and not is_generating(state, trajectory, assignment):
                silent[assignment.rollout] = silent.get(assignment.rollout, 0) + 1
                if _is_resume_pending(state, trajectory, assignment):
                    moving.add(assignment.rollout)
        return [
            rollout_load(rollout, silent.get(name, 0), name not in moving, state.version)
            for name, rollout in sorted(state.rollouts.items())
        ]

    def _gather(
        self, state: DispatchState, lengths: LengthHistory, loads: Iterable[RolloutLoad]
    ) -> OutlierPlan:
        shares: dict[int, float] = {}
        for group in state.groups.values():
            samples = self.groups_per_wave * len(group.admitted.trajectories)
            wave = group.admitted.wave
            shares[wave] = shares.get(wave, 0.0) + len(group.open) / samples
        growing = (state.admitted - state.closed) // self.groups_per_wave  # not fully admitted yet
        running = [
            found
            for trajectory, assignment in state.assignments.items()
            if is_generating(state, trajectory, assignment)
            and state.group_of(trajectory).admitted.wave < growing
            and (found := self._running(state, lengths, trajectory, assignment, shares)) is not None
        ]
        newest = [s for s in state.rollouts.values() if s.status.version == state.version]
        budget = lag_budget(
            self.max_lag, self._steps.lasts_s, [rollout.speed for rollout in newest]
        )
        return plan_outliers(running, list(loads), budget)

    def _running(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        trajectory: str,
        assignment: CurrentAssignment,
        shares: Mapping[int, float],
    ) -> RunningRequest | None:
        chain, group = state.chains[trajectory], state.group_of(trajectory)
        if group.prompt is None or chain.version is None:
            return None
        left = None
        if self.max_lag is not None:
            left = chain.version.number + self.max_lag - state.version.number
        return RunningRequest(
            trajectory=trajectory,
            rollout=assignment.rollout,
            version=chain.version,
            generated=chain.generated,
            kv=len(group.prompt.tokens) + chain.generated,
            expected=lengths.of_prompt(group.prompt),
            unfinished=shares[group.admitted.wave],
            lag_left=left,
            longest=group.prompt.sampling.tokens_max,
            all_members_open=len(group.open) == len(group.admitted.trajectories),
        )


def is_generating(state: DispatchState, trajectory: str, assignment: CurrentAssignment) -> bool:
    """Whether the assigned rollout generates the trajectory under this assignment, as a partial
    shows, and was not asked to release it.
    """
    chain = state.chains.get(trajectory)
    is_here = not assignment.onward and not assignment.given_up and state.is_held(assignment)
    return is_here and chain is not None and chain.attempt == assignment.attempt


def _is_resume_pending(
    state: DispatchState, trajectory: str, assignment: CurrentAssignment
) -> bool:
    """Whether the trajectory was assigned from a partial of the version that its rollout holds, and
    no new partial was published yet.
    """
    chain = state.chains.get(trajectory)
    held = state.rollouts[assignment.rollout].status.version
    return chain is not None and chain.attempt < assignment.attempt and chain.version == held


def rollout_load(seen: TrackedRollout, silent: int, is_still: bool, newest: Version) -> RolloutLoad:
    """Returns one rollout's load for the planners. `kv_previous` is its highest KV use under this
    version: a tail of few long answers grows between two plans and is a tail all the same. `silent`
    is the number of its assignments without a partial; if more of them than wait in the queue, some
    are running and dispatch cannot move them, so the rollout is not ready. `is_still` is False
    while a move or a resume at this rollout is under way. A rollout gains from being emptied only
    if it then pulls a newer version.
    """
    status = seen.status
    slots = status.slots
    is_able = status.health in ("generating", "draining") and not status.pulling
    pulls = status.version.number < newest.number
    return RolloutLoad(
        rollout=status.rollout,
        version=status.version,
        running=status.running,
        waiting=status.waiting - status.queued,
        kv_used=status.kv_used,
        kv_previous=seen.kv_peak,
        kv_capacity=status.kv_capacity,
        batch_max=min(status.decode_batch_max or slots, slots),
        ready=seen.fresh and status.verified and is_able and is_still and silent <= status.queued,
        gains=pulls and (status.health == "draining" or not status.queued),
    )


def _move_releases(state: DispatchState, onward: Mapping[str, str]) -> Iterator[Assignment]:
    for trajectory, destination in onward.items():
        prompt = state.group_of(trajectory).prompt
        if prompt is not None:
            yield release_record(prompt, trajectory, state.assignments[trajectory], destination)
