"""Plans the assignments to give now: one for each open trajectory that no rollout generates, as far
as rollouts have room (free slots, and places in their queues). Planning changes no argument
(invariant 9); the service appends the returned records. A plan holds, in this order:

1. resumes of trajectories that were released for a move, on the planned destination;
2. other resumes, some on a rollout that first loads their old version from the store;
3. starts from the prompt, of new samples and as restarts, oldest wave first;
4. with `fills_tails`, short ones of the other starts, beside the tails of draining rollouts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.consumers.dispatch import assignments
from rollstream.consumers.dispatch.admission import (
    AdmissionPace,
    WaveLayouts,
    admissible_now,
    rollout_speeds,
    start_version,
)
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.placement import (
    PlacementWork,
    RolloutRoom,
    WaveLayout,
    place_samples,
)
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.tails import fill_tails, tail_rooms
from rollstream.consumers.dispatch.version_reload import ReloadPlan, VersionReload
from rollstream.streams.records import Assignment, Prompt
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class PlannedAssignment:
    """Holds an assignment that is not appended yet."""

    record: Assignment
    discards_tokens: bool
    """Whether the trajectory restarts from its prompt and loses the tokens generated so far."""


@dataclass(frozen=True, slots=True)
class AssignmentPlanner:
    """Plans assignments under one run's settings. `queue_per_slot` assignments may wait for each
    slot of a rollout; `waves` states which rollouts take the long and the short samples of a wave.

    Under `keep_version` a resume needs the version of its trajectory. If versions are whole models,
    `history` decides when a rollout loads one that no rollout holds. If they are adapters,
    `is_loadable` states which versions any rollout can load beside those that it holds.
    """

    pace: AdmissionPace
    keep_version: bool
    queue_per_slot: float
    waves: WaveLayouts
    history: VersionReload | None = None
    is_loadable: Callable[[Version], bool] | None = None
    by_length: bool = True
    """Whether new samples are ordered and placed by their expected lengths."""
    fills_tails: bool = False
    """Whether short samples start beside the last long answers of a draining rollout."""

    def plan(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        ahead: Sequence[Prompt],
        now_s: float = 0.0,
    ) -> list[PlannedAssignment]:
        """Returns all assignments that can be given now. `ahead` are the prompts to be admitted
        next: they are ranked with their wave, and count as work that will need slots.
        """
        found = assignments.find_unassigned(state, lengths, self.keep_version, self.is_loadable)
        unassigned = [
            samples
            for samples in found
            if samples.kind != "start"
            or start_version(self.pace, state, samples.group) <= state.version.number
        ]
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
        if not self.by_length:
            starts = [replace(samples, mean=0.0) for samples in starts]
        layouts = self.waves.of((s.group.admitted.wave for s in starts), state, lengths, ahead)
        starts = assignments.in_start_order(starts, sum(max(0, room) for room in free.new.values()))
        planned += self._placed(state, starts, dict(free.new), free, layouts)  # 3
        return planned + list(self._filled(state, rest, planned))  # 4

    def _filled(
        self,
        state: DispatchState,
        unassigned: Sequence[assignments.UnassignedSamples],
        planned: Sequence[PlannedAssignment],
    ) -> Iterator[PlannedAssignment]:
        """Yields starts beside the tails of draining rollouts, of samples that nothing in `planned`
        starts. What needs a newer version than the rollout's is left out.
        """
        rooms = tail_rooms(state) if self.fills_tails else []
        if not rooms:
            return
        settled = {assigned.record.trajectory for assigned in planned}
        starts = [samples.without(settled) for samples in unassigned if samples.kind == "start"]
        for samples, trajectory, rollout in fill_tails(starts, rooms):
            yield self._assigned(state, samples, trajectory, rollout)

    def restart_on_newest(
        self, state: DispatchState, trajectories: Iterable[str], lengths: LengthHistory
    ) -> list[PlannedAssignment]:
        """Returns assignments that restart these trajectories from their prompts on the newest
        version, as far as the rollouts that hold this version have room.
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
        """Returns which rollouts load an old version, and for which trajectories. A load takes
        slots from other work only if more groups may be admitted or starts lack room.
        """
        if self.history is None:
            return ReloadPlan()
        starts = sum(len(samples.trajectories) for samples in unassigned if samples.kind == "start")
        allowed = admissible_now(self.pace, state)
        is_wanted = (has_more and allowed > 0) or starts > sum(free.new.values())
        return self.history.plan(state, lengths, unassigned, is_wanted, now_s)

    def _loading(
        self,
        state: DispatchState,
        unassigned: Iterable[assignments.UnassignedSamples],
        reloads: ReloadPlan,
        free: assignments.FreeRoom,
    ) -> Iterator[PlannedAssignment]:
        """Yields resumes on rollouts that load the trajectory's version first; these rollouts get
        no other work in this plan.
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
        """Yields resumes on the planned destinations of moves; room was reserved there when the
        moves were requested.
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
        """Returns assignments of these samples to the rollouts of `rooms`, as far as they fit, and
        uses up the room of `free`.
        """
        if not unassigned:
            return []
        tokens = _expected_tokens(state)
        workers = rollout_speeds(state, self.waves.by_speed)
        most = max(worker.slots for worker in workers) if workers else 1
        open_rooms = [
            RolloutRoom(
                w.rollout,
                rooms[w.rollout],
                tokens[w.rollout],
                w.speed * (w.slots / most),
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
            layout = layouts.get(samples.group.admitted.wave) if samples.mean else None
            is_short, is_urgent = 0 < samples.mean < median, samples.kind == "resume"
            works.append(
                PlacementWork(samples.trajectories, samples.mean, is_short, layout, is_urgent)
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
