"""Finds rollouts whose last long answers leave slots empty, for short answers under the same
version (docs/explanation/scheduling.md). An answer that fits ends before the tail does, so it
delays no newer version.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollstream.consumers.dispatch.planner import PlanDraft
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.unassigned import UnassignedSamples
from rollstream.streams.tails import FILL_LAG_MAX, fits_tail, tokens_left


@dataclass(slots=True)
class TailRoom:
    """`slots` are empty while an answer has `tokens` left."""

    rollout: str
    slots: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TailsFilled:
    """Starts short samples beside the tails of draining rollouts."""

    held_max: int = 0

    def plan(self, draft: PlanDraft) -> None:
        rooms = tail_rooms(draft.state)
        if rooms:
            for samples, trajectory, rollout in fill_tails(draft.rest("start"), rooms):
                draft.assign(samples, trajectory, rollout)

    def room(self, state: DispatchState) -> int:
        return sum(room.slots for room in tail_rooms(state))


def tail_rooms(state: DispatchState) -> list[TailRoom]:
    """The longest tail first, of rollouts that start no other work."""
    assigned, loading = state.assigned_counts(), state.loading()
    rooms: dict[str, TailRoom] = {}
    for name, rollout in state.rollouts.items():
        status = rollout.status
        is_able = rollout.fresh and status.verified and name not in loading
        lag = state.version.number - status.version.number
        # It has used up its quota; a sample that needs a newer version than its own is left out.
        drains = status.health == "draining" and 0 < lag <= FILL_LAG_MAX
        if is_able and drains and status.slots > assigned[name]:
            rooms[name] = TailRoom(name, status.slots - assigned[name], 0)
    for trajectory, current in state.assignments.items():
        room, chain = rooms.get(current.rollout), state.chains.get(trajectory)
        if room is None or chain is None or current.onward or chain.attempt != current.attempt:
            continue
        prompt = state.group_of(trajectory).prompt
        if prompt is not None:
            limit = prompt.sampling.tokens_max
            room.tokens = max(room.tokens, tokens_left(current.predicted, chain.generated, limit))
    return sorted((r for r in rooms.values() if r.tokens), key=lambda r: (-r.tokens, r.rollout))


def fill_tails(
    starts: Iterable[UnassignedSamples], rooms: Sequence[TailRoom]
) -> Iterator[tuple[UnassignedSamples, str, str]]:
    """Yields each start that fits a tail, the longest first, with its trajectory and rollout; uses
    up the room.
    """
    for samples in sorted(starts, key=lambda samples: -samples.mean):
        for trajectory in samples.trajectories:
            room = next((r for r in rooms if r.slots and fits_tail(samples.mean, r.tokens)), None)
            if room is None:
                break
            room.slots -= 1
            yield samples, trajectory, room.rollout
