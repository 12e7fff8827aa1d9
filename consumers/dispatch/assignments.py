"""Builds the records of admissions and assignments from plans. Pure; the service appends them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rollstream.consumers.dispatch.admission import AdmissionPace, version_needed, wave_of
from rollstream.consumers.dispatch.recovery import Continuation, continuation, rollouts_holding
from rollstream.consumers.dispatch.state import (
    CurrentAssignment,
    DispatchState,
    TrackedRollout,
    UnfinishedGroup,
)
from rollstream.streams.records import Admitted, Assignment, Prompt
from rollstream.streams.values import Address, Version


def admission_record(
    state: DispatchState, pace: AdmissionPace, prompt: Prompt, at: Address, deadline_s: float
) -> Admitted:
    """The record that admits a prompt's group as the next of its wave."""
    return Admitted(
        group=prompt.group,
        wave=wave_of(pace, state.admitted, state.closed),
        trajectories=tuple(f"{prompt.group}.{i}" for i in range(prompt.samples)),
        deadline_s=deadline_s,
        prompt=at,
    )


def held_versions(state: DispatchState) -> set[Version]:
    """Versions that a rollout serves or is loading."""
    held = {seen.status.version for seen in state.rollouts.values() if is_serving(seen)}
    return held | set(state.loading().values())


def continuations(
    state: DispatchState,
    lost: Iterable[str],
    keep_version: bool,
    held: Collection[Version] | None = None,
) -> dict[str, Continuation]:
    """How each lost trajectory continues; `held` are the `held_versions`, computed here if not
    given.
    """
    held = held_versions(state) if held is None else held
    return {
        t: continuation(state.orders.get(t), state.chains.get(t), keep_version, held) for t in lost
    }


def eligible_rollouts(state: DispatchState, version: Version | None) -> set[str]:
    """Rollouts that may resume work that needs this version."""
    serving = {n: seen.status.version for n, seen in state.rollouts.items() if is_serving(seen)}
    return rollouts_holding(serving | state.loading(), version)


def is_serving(seen: TrackedRollout) -> bool:
    """Whether the rollout verified its version and does not leave."""
    return seen.status.verified and seen.status.health != "leaving"


def assignment_record(
    state: DispatchState,
    pace: AdmissionPace,
    group: UnfinishedGroup,
    trajectory: str,
    how: Continuation,
    rollout: str,
    predicted: int = 0,
) -> Assignment:
    """The assignment of one trajectory; it names the rollout's term of the newest status."""
    assert group.prompt is not None, "an assignment is planned only once its prompt was read"
    prompt, wave = group.prompt, group.admitted.wave
    needed = how.version or Version(version_needed(pace, wave), 0)
    chain = state.chains.get(trajectory)
    return Assignment(
        kind=how.kind,
        trajectory=trajectory,
        group=group.admitted.group,
        index=group.admitted.trajectories.index(trajectory),
        attempt=how.attempt,
        rollout=rollout,
        rollout_term=state.rollouts[rollout].status.term,
        version=needed,
        task=prompt.task,
        tokens=prompt.tokens,
        sampling=prompt.sampling,
        seed=prompt.seed,
        reference=prompt.reference,
        partial=how.partial,
        moves=how.moves,
        wave=wave,
        predicted=predicted,
        from_history=how.version not in (None, state.rollouts[rollout].status.version),
        first=None if chain is None or how.partial is None else chain.first,
    )


def release_record(
    prompt: Prompt, trajectory: str, order: CurrentAssignment, onward: str = ""
) -> Assignment:
    """Asks a rollout to drop a trajectory, or, with `onward`, to give it up for that rollout."""
    return Assignment(
        kind="release",
        trajectory=trajectory,
        group=prompt.group,
        index=int(trajectory.rsplit(".", 1)[1]),
        attempt=order.attempt,
        rollout=order.rollout,
        rollout_term=order.rollout_term,
        version=order.version,
        task=prompt.task,
        tokens=prompt.tokens[:0],
        sampling=prompt.sampling,
        seed=prompt.seed,
        onward=onward,
    )


@dataclass(slots=True)
class FreeRoom:
    """Room that a plan uses up: for new trajectories, and for resumes (a draining rollout takes
    only resumes).
    """

    new: dict[str, int]
    resumes: dict[str, int]

    def take(self, rollout: str) -> None:
        for room in (self.new, self.resumes):
            if rollout in room:
                room[rollout] -= 1


def free_room(state: DispatchState, queue_per_slot: float) -> FreeRoom:
    """Room of every rollout that takes work: slots and queue, less its assignments in force.

    Under `keep_version` a rollout whose quota is drawn while a newer version is out takes nothing
    new; assignments that it has not started count against its quota. A rollout that loads a version
    from history takes only resumes under it.
    """
    free = FreeRoom({}, {})
    given, loading = state.assigned_counts(), state.loading()
    for name, seen in sorted(state.rollouts.items()):
        status = seen.status
        if not seen.fresh or not status.verified:
            continue
        room = max(0, status.slots + int(queue_per_slot * status.slots) - given[name])
        if name in loading or status.health in ("generating", "draining"):
            free.resumes[name] = room
        if name not in loading and status.health == "generating":
            drawn = max(0, given[name] - status.running)
            stale = status.version.number < state.version.number
            free.new[name] = max(0, min(room, status.quota_left - drawn)) if stale else room
    return free
