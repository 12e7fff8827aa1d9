"""Finds the open trajectories that no rollout generates, decides how each continues, orders them,
and counts the room of rollouts, as pure functions (invariant 9).

Recovery is level-triggered: one rule (`unassigned_trajectories`) serves new groups, dead rollouts,
moves and a new holder of dispatch's lease.

Reading list: after `consumers/dispatch/admission.py`, before `producers/rollout/worker.py`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from rollstream.consumers.dispatch.admission import AdmissionPace, next_wave, start_version
from rollstream.consumers.dispatch.state import (
    CurrentAssignment,
    DispatchState,
    PartialChain,
    TrackedRollout,
    UnfinishedGroup,
)
from rollstream.streams.records import Admitted, Assignment, Prompt
from rollstream.streams.values import Address, Version


@dataclass(frozen=True, slots=True)
class Continuation:
    """`attempt` starts from the prompt, or resumes from `partial`, the address of the newest one.
    `version` is the only version that may resume it, None if any may. `moves` counts earlier
    assignments. `discards_tokens`: a restart may lose generated tokens.
    """

    kind: Literal["start", "resume"]
    attempt: int
    partial: Address | None
    version: Version | None
    moves: int
    discards_tokens: bool


def unassigned_trajectories(state: DispatchState) -> list[list[str]]:
    """Returns them one list per group, oldest wave first."""
    live = {t for t, o in state.assignments.items() if not o.given_up and state.is_held(o)}
    groups = [
        (group.admitted.wave, number, unheld)
        for number, group in state.groups.items()
        if (unheld := [t for t in group.admitted.trajectories if t in group.open and t not in live])
    ]
    return [unheld for _, _, unheld in sorted(groups)]


def continuation(
    assignment: CurrentAssignment | None,
    chain: PartialChain | None,
    keep_version: bool,
    resumable: Collection[Version],
) -> Continuation:
    """Returns how the trajectory continues after `assignment`, its newest one: from the newest
    partial (`chain`), under `keep_version` only if its version is `resumable` (invariant 4), else
    again from the prompt. Before, `version_reload.py` weighs tokens that would be generated again
    against the slots of an idle rollout that loads the version.
    """
    attempt = 1 if assignment is None else assignment.attempt + 1
    moves = 0 if assignment is None else assignment.moves + 1
    # Without a partial, a trajectory that its rollout released has generated no tokens.
    if chain is None:
        discards_tokens = assignment is not None and not assignment.given_up
        return Continuation("start", attempt, None, None, moves, discards_tokens)
    if keep_version and chain.version not in resumable:
        return Continuation("start", attempt, None, None, moves, discards_tokens=True)
    exact = chain.version if keep_version else None
    return Continuation("resume", attempt, chain.at, exact, moves, discards_tokens=False)


def admission_record(
    state: DispatchState, pace: AdmissionPace, prompt: Prompt, at: Address, deadline_s: float
) -> Admitted:
    """Admits the group in the first wave that is not full."""
    return Admitted(
        group=prompt.group,
        wave=next_wave(pace, state),
        trajectories=tuple(f"{prompt.group}.{i}" for i in range(prompt.samples)),
        deadline_s=deadline_s,
        prompt=at,
        needed=prompt.needed,
        settings=prompt.settings if prompt.settings and prompt.settings.group else None,
    )


def held_versions(state: DispatchState) -> set[Version]:
    """The versions that at least one rollout serves or is loading."""
    serving = [rollout.status.held for rollout in state.rollouts.values() if is_serving(rollout)]
    return set[Version]().union(*serving, state.loading().values())


def continuations(
    state: DispatchState,
    trajectories: Iterable[str],
    keep_version: bool,
    resumable: Collection[Version] | None = None,
) -> dict[str, Continuation]:
    """`resumable` is by default `held_versions`."""
    resumable = held_versions(state) if resumable is None else resumable
    return {
        t: continuation(state.assignments.get(t), state.chains.get(t), keep_version, resumable)
        for t in trajectories
    }


def eligible_rollouts(state: DispatchState, version: Version | None) -> set[str]:
    """Returns rollouts that serve `version` as their newest or are loading it. None: of any
    version.
    """
    serving = {
        n: rollout.status.version for n, rollout in state.rollouts.items() if is_serving(rollout)
    }
    versions = serving | state.loading()
    return {name for name, serves in versions.items() if version is None or serves == version}


def is_serving(seen: TrackedRollout) -> bool:
    """Whether the rollout has verified the version that it serves, and is not leaving."""
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
    """Assigns under the term of the rollout's newest status. `predicted` is the expected number of
    generated tokens, 0 if unknown.
    """
    assert group.prompt is not None, "an assignment is planned only once its prompt was read"
    prompt, wave = group.prompt, group.admitted.wave
    needed = how.version or Version(start_version(pace, state, group), 0)
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
        from_history=how.version not in (None, *state.rollouts[rollout].status.held),
        first=None if chain is None or how.partial is None else chain.first,
    )


def release_record(
    prompt: Prompt, trajectory: str, assignment: CurrentAssignment, onward: str = ""
) -> Assignment:
    """Asks a rollout to stop generating a trajectory; with `onward`, the rollout that will resume
    it, the tokens are kept as a last partial.
    """
    return Assignment(
        kind="release",
        trajectory=trajectory,
        group=prompt.group,
        index=int(trajectory.rsplit(".", 1)[1]),
        attempt=assignment.attempt,
        rollout=assignment.rollout,
        rollout_term=assignment.rollout_term,
        version=assignment.version,
        task=prompt.task,
        tokens=prompt.tokens[:0],
        sampling=prompt.sampling,
        seed=prompt.seed,
        onward=onward,
    )


@dataclass(slots=True)
class FreeRoom:
    """How many more trajectories each rollout takes, `new` ones and `resumes`; a plan uses this up.
    A draining rollout takes only resumes.
    """

    new: dict[str, int]
    resumes: dict[str, int]

    def take(self, rollout: str) -> None:
        for room in (self.new, self.resumes):
            if rollout in room:
                room[rollout] -= 1


def slot_room(slots: int, queue_per_slot: float, parked: int) -> int:
    """Returns how many trajectories a rollout takes in all; `parked` ones wait for their
    environment without a slot.
    """
    return slots + int(queue_per_slot * slots) + parked


def free_room(state: DispatchState, queue_per_slot: float) -> FreeRoom:
    """The room of every rollout that takes work, less its assignments."""
    free = FreeRoom({}, {})
    assigned, loading = state.assigned_counts(), state.loading()
    for name, rollout in sorted(state.rollouts.items()):
        status = rollout.status
        if not rollout.fresh or not status.verified:
            continue
        parked = min(status.parked, status.parked_max)
        room = max(0, slot_room(status.slots, queue_per_slot, parked) - assigned[name])
        if name in loading or status.health in ("generating", "draining"):
            free.resumes[name] = room
        if name not in loading and status.health == "generating":
            # Under `keep_version` a rollout must finish all its assignments before it takes a newer
            # version, so those that it has not started count against its quota.
            drawn = max(0, assigned[name] - status.running - status.parked)
            stale = status.version.number < state.version.number
            free.new[name] = max(0, min(room, status.quota_left - drawn)) if stale else room
    return free
