"""Plans the assignments to give now. A plan is made by steps (`PlanStep`), each of which assigns
some of the rest of earlier ones. Changes no argument (invariant 9).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from rollstream.consumers.dispatch import assignments
from rollstream.consumers.dispatch.admission import AdmissionPace, room_to_admit, start_version
from rollstream.consumers.dispatch.layouts import WaveLayouts, rollout_speeds
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.placement import (
    PlacementWork,
    RolloutRoom,
    WaveLayout,
    place_samples,
)
from rollstream.consumers.dispatch.policy import PlannedAssignment
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.unassigned import (
    UnassignedSamples,
    find_unassigned,
    in_start_order,
)
from rollstream.streams.records import Prompt
from rollstream.streams.values import Version

IsLoadable = Callable[[DispatchState, Version], bool]


@dataclass(slots=True)
class PlanDraft:
    pace: AdmissionPace
    state: DispatchState
    lengths: LengthHistory
    ahead: Sequence[Prompt]
    now_s: float
    by_speed: bool
    """Whether rollouts count as fast as measured; else all are equal."""
    is_side_by_side: bool
    """Whether a rollout loads the version of a resume beside those that it serves."""
    unassigned: Sequence[UnassignedSamples]
    free: assignments.FreeRoom
    planned: list[PlannedAssignment] = field(default_factory=list[PlannedAssignment])
    put_off: set[str] = field(default_factory=set[str])
    """Trajectories that stay unassigned in this plan."""

    def rest(self, kind: str) -> list[UnassignedSamples]:
        """Returns samples of this kind that no step has assigned or put off."""
        settled = {assigned.record.trajectory for assigned in self.planned} | self.put_off
        parts = [samples.without(settled) for samples in self.unassigned if samples.kind == kind]
        return [part for part in parts if part.trajectories]

    def assign(self, samples: UnassignedSamples, trajectory: str, rollout: str) -> None:
        how, predicted = samples.how[trajectory], round(samples.mean)
        record = assignments.assignment_record(
            self.state, self.pace, samples.group, trajectory, how, rollout, predicted
        )
        self.planned.append(PlannedAssignment(record, how.discards_tokens))

    def place(
        self,
        unassigned: Sequence[UnassignedSamples],
        rooms: Mapping[str, int],
        layouts: Mapping[int, WaveLayout] | None = None,
    ) -> None:
        """Assigns as far as they fit, and uses up `free`; `layouts` by wave."""
        if not unassigned:
            return
        tokens = _expected_tokens(self.state)
        workers = rollout_speeds(self.state, self.by_speed)
        slots_max = max(worker.slots for worker in workers) if workers else 1
        open_rooms = [
            RolloutRoom(
                w.rollout,
                rooms[w.rollout],
                tokens[w.rollout],
                w.speed * (w.slots / slots_max),
                w.preemptible,
                w.kind,
            )
            for w in workers
            if w.rollout in rooms
        ]
        means = sorted(samples.mean for samples in unassigned if samples.mean)
        median = means[len(means) // 2] if means else 0.0
        works: list[PlacementWork] = []
        for samples in unassigned:
            layout = (layouts or {}).get(samples.group.admitted.wave) if samples.mean else None
            is_short, is_urgent = 0 < samples.mean < median, samples.kind == "resume"
            works.append(
                PlacementWork(samples.trajectories, samples.mean, is_short, layout, is_urgent)
            )
        parts = {
            trajectory: samples for samples in unassigned for trajectory in samples.trajectories
        }
        for trajectory, rollout in place_samples(works, open_rooms).items():
            self.free.take(rollout)
            self.assign(parts[trajectory], trajectory, rollout)


class PlanStep(Protocol):
    def plan(self, draft: PlanDraft) -> None:
        """Assign some of the draft's rest."""
        ...

    def room(self, state: DispatchState) -> int:
        """Returns for how many new samples this step has room beside free slots and queues."""
        ...

    @property
    def held_max(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepWithoutRoom:
    """A step that uses free slots and queues alone."""

    def room(self, state: DispatchState) -> int:
        return 0

    @property
    def held_max(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Moved(StepWithoutRoom):
    """Resumes of released trajectories on the destinations of their moves."""

    def plan(self, draft: PlanDraft) -> None:
        state = draft.state
        for samples in draft.unassigned:
            is_resume = samples.kind == "resume"
            eligible = (
                assignments.eligible_rollouts(state, samples.version) if is_resume else set[str]()
            )
            for trajectory in samples.trajectories:
                assignment = state.assignments.get(trajectory)
                if assignment is not None and assignment.given_up and assignment.onward in eligible:
                    # Room was reserved there when the move was requested.
                    draft.assign(samples, trajectory, assignment.onward)


@dataclass(frozen=True, slots=True)
class Resumed(StepWithoutRoom):
    """Other resumes, each on a rollout that serves its version or can load it beside its own."""

    def plan(self, draft: PlanDraft) -> None:
        resumes = draft.rest("resume")
        for version in sorted({samples.version for samples in resumes}, key=str):
            eligible = assignments.eligible_rollouts(
                draft.state, None if draft.is_side_by_side else version
            )
            rooms = {name: room for name, room in draft.free.resumes.items() if name in eligible}
            draft.place([samples for samples in resumes if samples.version == version], rooms)


@dataclass(frozen=True, slots=True)
class Started(StepWithoutRoom):
    """Starts from the prompt, oldest wave first, the longest of a wave first; without `by_length`
    in the order of their prompts.
    """

    waves: WaveLayouts
    by_length: bool = True

    def plan(self, draft: PlanDraft) -> None:
        starts = draft.rest("start")
        if not self.by_length:
            starts = [replace(samples, mean=0.0) for samples in starts]
        waves = (samples.group.admitted.wave for samples in starts)
        layouts = self.waves.of(waves, draft.state, draft.lengths, draft.ahead)
        room = sum(max(0, room) for room in draft.free.new.values())
        draft.place(in_start_order(starts, room), dict(draft.free.new), layouts)

    @property
    def held_max(self) -> int:
        return self.waves.held_max


@dataclass(frozen=True, slots=True)
class AssignmentPlanner:
    """`queue_per_slot` assignments may wait for each slot. For adapters, `is_loadable` returns
    whether any rollout can load a version beside those that it holds.
    """

    pace: AdmissionPace
    keep_version: bool
    queue_per_slot: float
    steps: Sequence[PlanStep]
    by_speed: bool = True
    is_loadable: IsLoadable | None = None

    def plan(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        ahead: Sequence[Prompt],
        now_s: float = 0.0,
    ) -> list[PlannedAssignment]:
        """`ahead` are the prompts to be admitted next, which are ranked with their wave, and count
        as work that will need slots.
        """
        loadable = None if self.is_loadable is None else partial(self.is_loadable, state)
        unassigned = [
            samples
            for samples in find_unassigned(state, lengths, self.keep_version, loadable)
            if samples.kind != "start"
            or start_version(self.pace, state, samples.group) <= state.version.number
        ]
        if not unassigned:
            return []
        draft = self._draft(state, lengths, ahead, now_s, unassigned)
        for step in self.steps:
            step.plan(draft)
        return draft.planned

    def room(self, state: DispatchState) -> int:
        free = sum(assignments.free_room(state, self.queue_per_slot).new.values())
        free += sum(step.room(state) for step in self.steps)
        unassigned = sum(map(len, assignments.unassigned_trajectories(state)))
        return room_to_admit(free, unassigned, max(step.held_max for step in self.steps))

    def restart_on_newest(
        self, state: DispatchState, trajectories: Iterable[str], lengths: LengthHistory
    ) -> list[PlannedAssignment]:
        """Restarts from the prompts on the newest version, as far as the rollouts that hold it have
        room.
        """
        restarts = [
            UnassignedSamples(
                group,
                group.prompt,
                (t,),
                {t: _start_on_newest(state, t)},
                lengths.mean(group.prompt),
            )
            for t in trajectories
            if (group := state.group_of(t)).prompt is not None
        ]
        draft = self._draft(state, lengths, (), 0.0, restarts)
        eligible = assignments.eligible_rollouts(state, state.version)
        draft.place(restarts, {n: room for n, room in draft.free.new.items() if n in eligible})
        return draft.planned

    def _draft(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        ahead: Sequence[Prompt],
        now_s: float,
        unassigned: Sequence[UnassignedSamples],
    ) -> PlanDraft:
        free = assignments.free_room(state, self.queue_per_slot)
        return PlanDraft(
            self.pace,
            state,
            lengths,
            ahead,
            now_s,
            self.by_speed,
            self.is_loadable is not None,
            unassigned,
            free,
        )


def _start_on_newest(state: DispatchState, trajectory: str) -> assignments.Continuation:
    assignment = state.assignments[trajectory]
    attempt, moves = assignment.attempt + 1, assignment.moves + 1
    return assignments.Continuation(
        "start", attempt, None, state.version, moves, discards_tokens=True
    )


def _expected_tokens(state: DispatchState) -> dict[str, float]:
    tokens = dict.fromkeys(state.rollouts, 0.0)
    for trajectory, assignment in state.assignments.items():
        if not assignment.given_up and state.is_held(assignment):
            chain = state.chains.get(trajectory)
            done = 0 if chain is None else chain.generated
            tokens[assignment.rollout] += max(0, assignment.predicted - done)
    return tokens
