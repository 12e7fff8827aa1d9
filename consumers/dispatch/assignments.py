"""Finds the open trajectories that no rollout generates, decides how each of them continues and in
which order they are assigned, and makes the records that a plan appends. The functions are pure
(invariant 9).

Recovery is level-triggered: an open trajectory without an assignment that a living rollout of the
assigned term holds is assigned again, whatever the cause: it was never assigned (dispatch died
after admitting), its rollout died, restarted under a new term, or released it for a move or before
leaving. One rule serves admission, recovery, moves and a new holder of dispatch's lease.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollstream.consumers.dispatch.admission import AdmissionPace, version_needed, wave_of
from rollstream.consumers.dispatch.lengths import LengthHistory
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
    """States how a trajectory continues under its next attempt. `discards_tokens` is True where it
    restarts although tokens were generated.
    """

    kind: Literal["start", "resume"]
    attempt: int
    partial: Address | None
    version: Version | None
    moves: int
    discards_tokens: bool


def unassigned_trajectories(state: DispatchState) -> list[list[str]]:
    """Returns the open trajectories that no living rollout holds, by group, oldest wave first."""
    held = {t for t, o in state.assignments.items() if not o.given_up and state.is_held(o)}
    found = [
        (group.admitted.wave, number, unheld)
        for number, group in state.groups.items()
        if (unheld := [t for t in group.admitted.trajectories if t in group.open and t not in held])
    ]
    return [unheld for _, _, unheld in sorted(found)]


def continuation(
    assignment: CurrentAssignment | None,
    chain: PartialChain | None,
    keep_version: bool,
    held: Collection[Version],
) -> Continuation:
    """Returns how the trajectory continues: it resumes from the newest partial, under
    `keep_version` only if a rollout holds the partial's version (invariant 4).

    If none does, the trajectory restarts on the newest version, unless it is cheaper that an idle
    rollout loads the old version from history (decided by the caller).
    """
    attempt = 1 if assignment is None else assignment.attempt + 1
    moves = 0 if assignment is None else assignment.moves + 1
    if chain is None:  # without a first token a released trajectory discards nothing
        discards_tokens = assignment is not None and not assignment.given_up
        return Continuation("start", attempt, None, None, moves, discards_tokens)
    if keep_version and chain.version not in held:
        return Continuation("start", attempt, None, None, moves, discards_tokens=True)
    exact = chain.version if keep_version else None
    return Continuation("resume", attempt, chain.at, exact, moves, discards_tokens=False)


def admission_record(
    state: DispatchState, pace: AdmissionPace, prompt: Prompt, at: Address, deadline_s: float
) -> Admitted:
    """Returns the record that admits a prompt's group as the next of its wave."""
    return Admitted(
        group=prompt.group,
        wave=wave_of(pace, state.admitted, state.closed),
        trajectories=tuple(f"{prompt.group}.{i}" for i in range(prompt.samples)),
        deadline_s=deadline_s,
        prompt=at,
    )


def held_versions(state: DispatchState) -> set[Version]:
    """Returns the versions that any rollout serves or is loading."""
    serving = [rollout.status.held for rollout in state.rollouts.values() if is_serving(rollout)]
    return set[Version]().union(*serving, state.loading().values())


def continuations(
    state: DispatchState,
    trajectories: Iterable[str],
    keep_version: bool,
    held: Collection[Version] | None = None,
) -> dict[str, Continuation]:
    """Returns how each of these trajectories continues; `held` are the `held_versions`, computed
    here if not given.
    """
    held = held_versions(state) if held is None else held
    return {
        t: continuation(state.assignments.get(t), state.chains.get(t), keep_version, held)
        for t in trajectories
    }


def eligible_rollouts(state: DispatchState, version: Version | None) -> set[str]:
    """Returns the rollouts that may resume work that needs exactly this version; all that serve or
    load any version if `version` is None.
    """
    serving = {
        n: rollout.status.version for n, rollout in state.rollouts.items() if is_serving(rollout)
    }
    held = serving | state.loading()
    return {name for name, serves in held.items() if version is None or serves == version}


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
    """Returns the assignment of one trajectory; it names the rollout's term of the newest
    status.
    """
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
        from_history=how.version not in (None, *state.rollouts[rollout].status.held),
        first=None if chain is None or how.partial is None else chain.first,
    )


def release_record(
    prompt: Prompt, trajectory: str, assignment: CurrentAssignment, onward: str = ""
) -> Assignment:
    """Returns the record that asks a rollout to drop a trajectory, or, with `onward`, to give it up
    for that rollout.
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
    """Counts the room that a plan uses up: for new trajectories, and for resumes (a draining
    rollout takes only resumes).
    """

    new: dict[str, int]
    resumes: dict[str, int]

    def take(self, rollout: str) -> None:
        """Use up the room for one trajectory."""
        for room in (self.new, self.resumes):
            if rollout in room:
                room[rollout] -= 1


def free_room(state: DispatchState, queue_per_slot: float) -> FreeRoom:
    """Returns the room of every rollout that takes work: its slots and queue, less its assignments
    in force.

    Under `keep_version` a rollout whose quota is drawn while a newer version is out takes nothing
    new; assignments that it has not started count against its quota. A rollout that loads a version
    from history takes only resumes under it.
    """
    free = FreeRoom({}, {})
    given, loading = state.assigned_counts(), state.loading()
    for name, rollout in sorted(state.rollouts.items()):
        status = rollout.status
        if not rollout.fresh or not status.verified:
            continue
        room = max(0, status.slots + int(queue_per_slot * status.slots) - given[name])
        if name in loading or status.health in ("generating", "draining"):
            free.resumes[name] = room
        if name not in loading and status.health == "generating":
            drawn = max(0, given[name] - status.running)
            stale = status.version.number < state.version.number
            free.new[name] = max(0, min(room, status.quota_left - drawn)) if stale else room
    return free


@dataclass(frozen=True, slots=True)
class UnassignedSamples:
    """Holds unassigned trajectories of one group that continue in the same way; `mean` is the
    expected length of one in tokens, 0 when unknown.
    """

    group: UnfinishedGroup
    prompt: Prompt
    trajectories: tuple[str, ...]
    how: Mapping[str, Continuation]
    mean: float

    @property
    def kind(self) -> str:
        return self.how[self.trajectories[0]].kind

    @property
    def version(self) -> Version | None:
        return self.how[self.trajectories[0]].version

    def is_probe(self) -> bool:
        """Whether this is the first sample of a group of unknown length."""
        return not self.mean and self.trajectories == self.group.admitted.trajectories[:1]

    def without(self, settled: set[str]) -> "UnassignedSamples":
        return replace(self, trajectories=tuple(t for t in self.trajectories if t not in settled))


def find_unassigned(
    state: DispatchState,
    lengths: LengthHistory,
    keep_version: bool,
    is_loadable: Callable[[Version], bool] | None = None,
) -> Iterator[UnassignedSamples]:
    """Yields all unassigned trajectories, oldest wave first; those of a group whose prompt was not
    read yet are left out. `is_loadable` returns whether a rollout can load a version beside those
    that it holds; it is None if rollouts hold one version.
    """
    found = unassigned_trajectories(state)
    held = held_versions(state) if found and keep_version else set[Version]()
    if is_loadable is not None:
        held |= {
            version for version in _chain_versions(state, found) - held if is_loadable(version)
        }
    for trajectories in found:
        group = state.group_of(trajectories[0])
        if group.prompt is None:
            continue
        how = continuations(state, trajectories, keep_version, held)
        mean = lengths.mean(group.prompt, group.finished)
        for kind, version in sorted({(h.kind, h.version) for h in how.values()}, key=str):
            alike = [t for t in trajectories if (how[t].kind, how[t].version) == (kind, version)]
            yield UnassignedSamples(group, group.prompt, tuple(alike), how, mean)


def _chain_versions(state: DispatchState, unassigned: Sequence[Sequence[str]]) -> set[Version]:
    """Returns the versions of the chains of unassigned trajectories, except those whose last
    assignment loaded its version from history already.
    """
    chains = (
        state.chains.get(trajectory)
        for trajectories in unassigned
        for trajectory in trajectories
        if (known := state.assignments.get(trajectory)) is None or not known.from_history
    )
    return {chain.version for chain in chains if chain is not None and chain.version is not None}


def in_start_order(starts: Sequence[UnassignedSamples], room: int) -> list[UnassignedSamples]:
    """Sort by wave, oldest first, and within a wave the longest first, so that the long tail starts
    early. When not all fit, one probe of each group of unknown length comes before that, as in Seer
    (`lengths.py`); an unknown length counts as the limit.
    """
    parts = list(starts)
    if room < sum(len(samples.trajectories) for samples in starts):
        parts = [part for samples in starts for part in _split_off_probe(samples)]

    def start_key(one: UnassignedSamples) -> tuple[int, bool, float, int]:
        length = one.mean or one.prompt.sampling.tokens_max
        return one.group.admitted.wave, not one.is_probe(), -length, one.prompt.group

    return sorted(parts, key=start_key)


def _split_off_probe(one: UnassignedSamples) -> list[UnassignedSamples]:
    probe = replace(one, trajectories=one.trajectories[:1])
    if not probe.is_probe() or len(one.trajectories) == 1:
        return [one]
    return [probe, replace(one, trajectories=one.trajectories[1:])]
