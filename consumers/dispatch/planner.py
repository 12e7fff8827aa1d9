"""Plans the assignments to give now: one for every open trajectory that no rollout generates, while
there is room. The planner does not change its arguments (invariant 9); the service appends the
returned records. A plan holds, in this order:

1. Trajectories released for a move go to the planned destination. 2. Other resumes, some of them
   after their version was loaded from history. 3. New samples, in their order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.consumers.dispatch import assignments
from rollstream.consumers.dispatch.admission import (
    AdmissionPace,
    WaveLayouts,
    admissible_groups,
    rollout_speeds,
)
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.placement import (
    PlacementWork,
    RolloutRoom,
    WaveLayout,
    place_samples,
)
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.version_reload import ReloadPlan, VersionReload
from rollstream.streams.records import Assignment, Prompt
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class PlannedAssignment:
    """Holds an assignment that is not appended yet."""

    record: Assignment
    discards_tokens: bool
    """Whether the trajectory restarts and tokens that it has generated are discarded."""


@dataclass(frozen=True, slots=True)
class AssignmentPlanner:
    """Plans assignments under one run's settings. With `is_loadable` rollouts serve adapters: each
    of them may resume a trajectory of any version for which it returns True, and loads that version
    beside those that it holds.
    """

    pace: AdmissionPace
    keep_version: bool
    queue_per_slot: float
    waves: WaveLayouts
    history: VersionReload | None = None
    is_loadable: Callable[[Version], bool] | None = None

    def plan(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        ahead: Sequence[Prompt],
        now_s: float = 0.0,
    ) -> list[PlannedAssignment]:
        """Returns all assignments that can be given now; `ahead` are the prompts to be admitted
        next.
        """
        unassigned = list(
            assignments.find_unassigned(state, lengths, self.keep_version, self.is_loadable)
        )
        if not unassigned:
            return []
        free = assignments.free_room(state, self.queue_per_slot)
        reloads = self._plan_reloads(state, lengths, unassigned, free, bool(ahead), now_s)
        planned = list(self._moved(state, unassigned))  # 1
        planned += self._loading(state, unassigned, reloads, free)  # 2
        settled = {assigned.record.trajectory for assigned in planned} | reloads.waiting
        rest = [part for samples in unassigned if (part := samples.without(settled)).trajectories]
        resumes = [samples for samples in rest if samples.kind == "resume"]
        for version in sorted({samples.version for samples in resumes}, key=str):
            eligible = assignments.eligible_rollouts(
                state, version if self.is_loadable is None else None
            )
            rooms = {name: room for name, room in free.resumes.items() if name in eligible}
            alike = [samples for samples in resumes if samples.version == version]
            planned += self._placed(state, alike, rooms, free, {})  # 2
        starts = [samples for samples in rest if samples.kind == "start"]
        layouts = self.waves.of((s.group.admitted.wave for s in starts), state, lengths, ahead)
        starts = assignments.in_start_order(starts, sum(max(0, room) for room in free.new.values()))
        return planned + self._placed(state, starts, dict(free.new), free, layouts)  # 3

    def restart_on_newest(
        self, state: DispatchState, trajectories: Iterable[str], lengths: LengthHistory
    ) -> list[PlannedAssignment]:
        """Returns assignments that restart these trajectories on the newest version, as far as
        rollouts that hold it have room.
        """
        free = assignments.free_room(state, self.queue_per_slot)
        eligible = assignments.eligible_rollouts(state, state.version)
        restarts = [
            assignments.UnassignedSamples(
                group,
                group.prompt,
                (t,),
                {t: _start_on_newest(state, t)},
                lengths.mean(group.prompt),
            )
            for t in trajectories
            if (group := state.group_of(t)).prompt is not None
        ]
        rooms = {name: room for name, room in free.new.items() if name in eligible}
        return self._placed(state, restarts, rooms, free, {})

    def _plan_reloads(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        unassigned: Sequence[assignments.UnassignedSamples],
        free: assignments.FreeRoom,
        has_more: bool,
        now_s: float,
    ) -> ReloadPlan:
        """Returns which versions to load from history. Slots are wanted while more groups may be
        admitted or samples wait for room.
        """
        if self.history is None:
            return ReloadPlan()
        starts = sum(len(samples.trajectories) for samples in unassigned if samples.kind == "start")
        allowed = admissible_groups(
            self.pace, state.version.number, state.admitted, state.closed, state.trained
        )
        is_wanted = (has_more and allowed > 0) or starts > sum(free.new.values())
        return self.history.plan(state, lengths, unassigned, is_wanted, now_s)

    def _loading(
        self,
        state: DispatchState,
        unassigned: Iterable[assignments.UnassignedSamples],
        reloads: ReloadPlan,
        free: assignments.FreeRoom,
    ) -> Iterator[PlannedAssignment]:
        """Yields resumes at rollouts that load their version first; those rollouts get no other
        work meanwhile.
        """
        for samples in unassigned:
            for trajectory in samples.trajectories:
                rollout = reloads.loads.get(trajectory)
                if rollout is None:
                    continue
                for room in (free.new, free.resumes):
                    room.pop(rollout, None)
                known, chain = state.assignments.get(trajectory), state.chains[trajectory]
                assert chain.version is not None, "its version is loaded"
                how = {trajectory: assignments.continuation(known, chain, True, (chain.version,))}
                yield self._assigned(state, replace(samples, how=how), trajectory, rollout)

    def _moved(
        self, state: DispatchState, unassigned: Iterable[assignments.UnassignedSamples]
    ) -> Iterator[PlannedAssignment]:
        """Yields resumes at the planned destinations; their room was reserved when the moves were
        requested.
        """
        for samples in unassigned:
            is_resume = samples.kind == "resume"
            eligible = (
                assignments.eligible_rollouts(state, samples.version) if is_resume else set[str]()
            )
            for trajectory in samples.trajectories:
                known = state.assignments.get(trajectory)
                if known is not None and known.given_up and known.onward in eligible:
                    yield self._assigned(state, samples, trajectory, known.onward)

    def _placed(
        self,
        state: DispatchState,
        unassigned: Sequence[assignments.UnassignedSamples],
        rooms: Mapping[str, int],
        free: assignments.FreeRoom,
        layouts: Mapping[int, WaveLayout],
    ) -> list[PlannedAssignment]:
        if not unassigned:
            return []
        tokens = _expected_tokens(state)
        open_rooms = [
            RolloutRoom(w.rollout, rooms[w.rollout], tokens[w.rollout], w.speed, w.preemptible)
            for w in rollout_speeds(state)
            if w.rollout in rooms
        ]
        means = sorted(samples.mean for samples in unassigned if samples.mean)
        median = means[len(means) // 2] if means else 0.0
        works: list[PlacementWork] = []
        for samples in unassigned:
            layout = layouts.get(samples.group.admitted.wave) if samples.mean else None
            works.append(
                PlacementWork(samples.trajectories, samples.mean, 0 < samples.mean < median, layout)
            )
        parts = {
            trajectory: samples for samples in unassigned for trajectory in samples.trajectories
        }
        planned: list[PlannedAssignment] = []
        for trajectory, rollout in place_samples(works, open_rooms).items():
            free.take(rollout)
            planned.append(self._assigned(state, parts[trajectory], trajectory, rollout))
        return planned

    def _assigned(
        self,
        state: DispatchState,
        one: assignments.UnassignedSamples,
        trajectory: str,
        rollout: str,
    ) -> PlannedAssignment:
        how, predicted = one.how[trajectory], round(one.mean)
        record = assignments.assignment_record(
            state, self.pace, one.group, trajectory, how, rollout, predicted
        )
        return PlannedAssignment(record, how.discards_tokens)


def _start_on_newest(state: DispatchState, trajectory: str) -> assignments.Continuation:
    known = state.assignments[trajectory]
    attempt, moves = known.attempt + 1, known.moves + 1
    return assignments.Continuation(
        "start", attempt, None, state.version, moves, discards_tokens=True
    )


def _expected_tokens(state: DispatchState) -> dict[str, float]:
    """Returns the expected tokens that each rollout still has to generate; trajectories without a
    prediction count 0.
    """
    tokens = dict.fromkeys(state.rollouts, 0.0)
    for trajectory, known in state.assignments.items():
        if not known.given_up and state.is_held(known):
            chain = state.chains.get(trajectory)
            done = 0 if chain is None else chain.generated
            tokens[known.rollout] += max(0, known.predicted - done)
    return tokens
