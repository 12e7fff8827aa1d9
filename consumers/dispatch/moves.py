"""Repacks running trajectories (requests). A move is three records: dispatch's release names the
destination (`onward`); the source's last partial gives the trajectory up; dispatch assigns the next
attempt there. So a death in between is recovered (docs/explanation/scheduling.md).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rollstream.consumers.dispatch import repack
from rollstream.consumers.dispatch.assignments import release_record
from rollstream.consumers.dispatch.layouts import rollout_speeds
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.policy import MoveSummary
from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState, TrackedRollout
from rollstream.streams.records import Assignment
from rollstream.streams.values import Version

# Longest wait for a source's last partial. An answer that is already being scored gets none.
MOVE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """`releases` to append, trajectories to restart on the newest version, and the rollouts of
    which all requests move.
    """

    releases: tuple[Assignment, ...] = ()
    restarts: tuple[str, ...] = ()
    moves: tuple[repack.RepackMove, ...] = ()

    def summaries(self) -> tuple[MoveSummary, ...]:
        counts = Counter((release.rollout, release.onward) for release in self.releases)
        return tuple(MoveSummary(*both, count) for both, count in sorted(counts.items()))


@dataclass(slots=True)
class RepackPlanner:
    """Plans every `every_s` seconds, and at once after a new version that rollouts do not hold yet:
    all requests of nearly empty rollouts, then single outliers of the others, so that rollouts
    become empty and load it.
    """

    every_s: float
    max_lag: int | None
    groups_per_wave: int
    by_speed: bool = True
    _due_s: float = 0.0
    _version: Version | None = None
    _asked_s: dict[str, float] = field(default_factory=dict[str, float])
    _steps: repack.StepDuration = field(default_factory=repack.StepDuration)

    def plan(self, state: DispatchState, lengths: LengthHistory, now_s: float) -> RepackPlan | None:
        """Returns the plan that is due, maybe empty; None while none is due."""
        self._steps.observe(state.version.number, now_s)
        if now_s < self._due_s and state.version == self._version:
            return None
        self._due_s, self._version = now_s + self.every_s, state.version
        if all(s.status.version.number >= state.version.number for s in state.rollouts.values()):
            # Every rollout holds the newest version.
            return RepackPlan()
        loads = self._loads(state, now_s)
        moves = repack.plan_repack(loads)
        giving = {move.source: move.destination for move in moves}
        # Rollouts that neither give nor take requests in `moves`.
        other_loads = [load for load in loads if load.rollout not in {*giving, *giving.values()}]
        onward, restarts = self._gather(state, lengths, other_loads)
        for trajectory, assignment in state.assignments.items():
            if assignment.rollout in giving and is_generating(state, trajectory, assignment):
                onward[trajectory] = giving[assignment.rollout]
        self._asked_s |= dict.fromkeys(onward, now_s)
        return RepackPlan(tuple(_move_releases(state, onward)), restarts, moves)

    def _loads(self, state: DispatchState, now_s: float) -> list[repack.RolloutLoad]:
        for trajectory, assignment in state.assignments.items():
            if assignment.onward:
                # Released by an earlier holder of dispatch's lease, at an unknown time.
                self._asked_s.setdefault(trajectory, now_s)
        self._asked_s = {t: at_s for t, at_s in self._asked_s.items() if t in state.assignments}
        moving: set[str] = set()
        silent: dict[str, int] = {}
        for trajectory, assignment in state.assignments.items():
            if not state.is_held(assignment):
                continue
            # If the trajectory completes at the source instead, its move is dropped (invariant 2).
            if assignment.onward and now_s - self._asked_s[trajectory] < MOVE_TIMEOUT_S:
                moving |= {assignment.rollout, assignment.onward}
            if not assignment.onward and not is_generating(state, trajectory, assignment):
                silent[assignment.rollout] = silent.get(assignment.rollout, 0) + 1
                # It resumes there, under the rollout's version, without a partial from there yet.
                if _is_resume_pending(state, trajectory, assignment):
                    moving.add(assignment.rollout)
        kinds = {worker.rollout: worker.kind for worker in rollout_speeds(state, self.by_speed)}
        return [
            replace(
                rollout_load(rollout, silent.get(name, 0), name not in moving, state.version),
                kind=kinds[name],
            )
            for name, rollout in sorted(state.rollouts.items())
        ]

    def _gather(
        self, state: DispatchState, lengths: LengthHistory, loads: Iterable[repack.RolloutLoad]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        shares: dict[int, float] = {}
        for group in state.groups.values():
            samples = self.groups_per_wave * len(group.admitted.trajectories)
            wave = group.admitted.wave
            shares[wave] = shares.get(wave, 0.0) + len(group.open) / samples
        # The first wave that is not wholly admitted.
        # The unfinished share of a wave means nothing while groups are still admitted to it.
        growing = (state.admitted - state.closed) // self.groups_per_wave
        running = [
            r
            for trajectory, assignment in state.assignments.items()
            if is_generating(state, trajectory, assignment)
            and state.group_of(trajectory).admitted.wave < growing
            and (r := self._running(state, lengths, trajectory, assignment, shares)) is not None
        ]
        newest = [s for s in state.rollouts.values() if s.status.version == state.version]
        budget = repack.lag_budget(
            self.max_lag, self._steps.lasts_s, [rollout.speed for rollout in newest]
        )
        return repack.plan_outliers(running, list(loads), budget)

    def _running(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        trajectory: str,
        assignment: CurrentAssignment,
        shares: Mapping[int, float],
    ) -> repack.RunningRequest | None:
        chain, group = state.chains[trajectory], state.group_of(trajectory)
        if group.prompt is None or chain.version is None:
            return None
        lag_left = None
        if self.max_lag is not None:
            lag_left = chain.version.number + self.max_lag - state.version.number
        return repack.RunningRequest(
            trajectory=trajectory,
            rollout=assignment.rollout,
            version=chain.version,
            generated=chain.generated,
            kv=len(group.prompt.tokens) + chain.generated,
            expected=lengths.of_prompt(group.prompt),
            unfinished=shares[group.admitted.wave],
            lag_left=lag_left,
            longest=group.prompt.sampling.tokens_max,
            all_members_open=len(group.open) == len(group.admitted.trajectories),
        )


def is_generating(state: DispatchState, trajectory: str, assignment: CurrentAssignment) -> bool:
    """Whether the assigned rollout lives, has published a partial under this assignment, and was
    not asked to release it.
    """
    chain = state.chains.get(trajectory)
    is_here = not assignment.onward and not assignment.given_up and state.is_held(assignment)
    return is_here and chain is not None and chain.attempt == assignment.attempt


def _is_resume_pending(
    state: DispatchState, trajectory: str, assignment: CurrentAssignment
) -> bool:
    chain = state.chains.get(trajectory)
    served = state.rollouts[assignment.rollout].status.version
    return chain is not None and chain.attempt < assignment.attempt and chain.version == served


def rollout_load(
    seen: TrackedRollout, silent: int, is_still: bool, newest: Version
) -> repack.RolloutLoad:
    """`silent` is the number of the rollout's assignments without a partial; `is_still` is False
    while a move or a resume is under way there.
    """
    status = seen.status
    slots = status.slots
    is_able = status.health in ("generating", "draining") and not status.pulling
    pulls = status.version.number < newest.number
    return repack.RolloutLoad(
        rollout=status.rollout,
        version=status.version,
        running=status.running + status.parked,  # these will need slots again
        waiting=status.waiting - status.queued,
        kv_used=status.kv_used,
        # The highest under this version, not that of the previous plan: the KV of a rollout's last
        # long answers grows between two plans, although it is nearly empty.
        kv_previous=seen.kv_peak,
        kv_capacity=status.kv_capacity,
        batch_max=min(status.decode_batch_max or slots, slots),
        # More silent ones than wait in the queue: some run already, and cannot be moved without a
        # partial.
        ready=seen.fresh and status.verified and is_able and is_still and silent <= status.queued,
        # Only a rollout that then loads a newer version gains.
        gains=pulls and (status.health == "draining" or not status.queued),
    )


def _move_releases(state: DispatchState, onward: Mapping[str, str]) -> Iterator[Assignment]:
    for trajectory, destination in onward.items():
        prompt = state.group_of(trajectory).prompt
        if prompt is not None:
            yield release_record(prompt, trajectory, state.assignments[trajectory], destination)
