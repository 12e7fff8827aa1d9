"""Which unfinished trajectories continue under an old version that no rollout holds: an idle
rollout loads it if this costs less than restarts on the newest version (invariant 4;
docs/explanation/scheduling.md).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from rollstream.consumers.dispatch.admission import admissible_now
from rollstream.consumers.dispatch.assignments import continuation, is_serving
from rollstream.consumers.dispatch.layouts import rollout_speeds
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.planner import PlanDraft, StepWithoutRoom
from rollstream.consumers.dispatch.state import DispatchState, PartialChain
from rollstream.consumers.dispatch.unassigned import UnassignedSamples
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class UnheldTrajectory:
    """`gained` tokens are generated, `left` more expected."""

    trajectory: str
    gained: int
    left: float


@dataclass(frozen=True, slots=True)
class IdleRollout:
    """A rollout that could load a version in `load_s` seconds; one slot generates `speed` tokens
    per second. `is_wanted`: other work needs the slots. `refills`: it gets new trajectories under
    that version.
    """

    slots: int
    load_s: float
    speed: float
    is_wanted: bool
    refills: bool


def trajectories_to_reload(
    unheld: Sequence[UnheldTrajectory], emptied: IdleRollout
) -> tuple[str, ...]:
    """Returns the trajectories that continue on `emptied`, at most one per slot; all others
    restart.
    """

    # One plan is compared for each n. Slots stay empty until the longest loaded trajectory ends, so
    # it loads the n with the fewest expected tokens; with `refills` no slot stays empty, so it
    # loads those with the most generated ones.
    def cheapest_first(candidate: UnheldTrajectory) -> tuple[float, int, str]:
        return 0.0 if emptied.refills else candidate.left, -candidate.gained, candidate.trajectory

    ordered = sorted(unheld, key=cheapest_first)
    choices = range(min(len(ordered), emptied.slots) + 1)
    best = min(choices, key=lambda n: (reload_cost(ordered[:n], ordered[n:], emptied), -n))
    return tuple(sorted(reloaded.trajectory for reloaded in ordered[:best]))


def reload_cost(
    loaded: Sequence[UnheldTrajectory], restarted: Sequence[UnheldTrajectory], emptied: IdleRollout
) -> float:
    """The cost in tokens that one slot could have generated: lost work plus delay."""
    # A restart generates tokens again; a load leaves slots empty meanwhile and, on a rollout that
    # gets no new work under it, until the last loaded trajectory ends.
    lost_work = float(sum(trajectory.gained for trajectory in restarted))
    # The load, or the tokens generated again, postpone the last trajectory of a wave, for which all
    # slots of one rollout wait.
    delay = float(max((trajectory.gained for trajectory in restarted), default=0))
    if loaded:
        load_tokens = emptied.load_s * emptied.speed
        # To the old version, and back to the newest.
        lost_work += emptied.slots * 2 * load_tokens
        if not emptied.refills:
            lost_work += emptied.slots * max(trajectory.left for trajectory in loaded)
            lost_work -= sum(trajectory.left for trajectory in loaded)
        delay = max(delay, load_tokens)
    # Lost work is free where no other work needs the slots.
    return lost_work * emptied.is_wanted + emptied.slots * delay


IDLE_WAIT_S = 15.0  # longest wait for an idle rollout: a killed one is back by then


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """`waiting` ones stay unassigned until a rollout is idle, at most `IDLE_WAIT_S`."""

    loads: Mapping[str, str] = field(default_factory=dict[str, str])
    waiting: frozenset[str] = frozenset()


@dataclass(slots=True)
class VersionReload:
    """`bytes_of` returns the bytes to read for a version, None if the store deleted it
    (`versions_max`).
    """

    bytes_of: Callable[[Version], int | None]
    bytes_per_s: float
    max_lag: int | None
    _bytes: dict[Version, int | None] = field(default_factory=dict[Version, int | None])
    _since_s: dict[str, float] = field(default_factory=dict[str, float])

    def plan(
        self,
        state: DispatchState,
        lengths: LengthHistory,
        unassigned: Sequence[UnassignedSamples],
        is_wanted: bool,
        now_s: float,
    ) -> ReloadPlan:
        """Plans for unassigned trajectories under versions that no rollout holds, oldest first."""
        unheld = self._unheld(state, lengths, unassigned)
        trajectories = [u.trajectory for batch in unheld.values() for u in batch]
        self._since_s = {t: self._since_s.get(t, now_s) for t in trajectories}
        if not state.rollouts:
            return ReloadPlan()
        self._bytes = {v: self._bytes[v] if v in self._bytes else self.bytes_of(v) for v in unheld}
        empty = idle_rollouts(state)
        loads: dict[str, str] = {}
        waiting: set[str] = set()
        for version, batch in sorted(unheld.items()):
            size = self._bytes[version]
            if size is None:
                continue
            name = empty[0] if empty else ""
            chosen = trajectories_to_reload(
                batch, self._loading_rollout(state, name, version, size, is_wanted)
            )
            if name and chosen:
                loads |= dict.fromkeys(chosen, empty.pop(0))
            elif chosen:
                waiting |= {t for t in chosen if now_s - self._since_s[t] < IDLE_WAIT_S}
        return ReloadPlan(loads, frozenset(waiting))

    def _unheld(
        self, state: DispatchState, lengths: LengthHistory, unassigned: Iterable[UnassignedSamples]
    ) -> dict[Version, list[UnheldTrajectory]]:
        by_version: dict[Version, list[UnheldTrajectory]] = {}
        for samples in unassigned:
            for trajectory in samples.trajectories if samples.kind == "start" else ():
                chain, assignment = state.chains.get(trajectory), state.assignments.get(trajectory)
                if chain is None or chain.version is None or self._is_too_old(state, chain):
                    continue
                # A trajectory whose last assignment was such a load restarts.
                if assignment is None or not assignment.from_history:
                    tokens_left = _tokens_left(samples, lengths, chain)
                    unheld = UnheldTrajectory(trajectory, chain.generated, tokens_left)
                    by_version.setdefault(chain.version, []).append(unheld)
        return by_version

    def _is_too_old(self, state: DispatchState, chain: PartialChain) -> bool:
        assert chain.version is not None, "checked by the caller"
        lag = state.version.number - chain.version.number
        # Above it, invariant 5 drops the trajectory in any case.
        return self.max_lag is not None and lag > self.max_lag

    def _loading_rollout(
        self, state: DispatchState, name: str, version: Version, size: int, is_wanted: bool
    ) -> IdleRollout:
        workers = [w for w in rollout_speeds(state) if name in ("", w.rollout)]
        # Without a name, a typical rollout.
        slots = median(state.rollouts[worker.rollout].status.slots for worker in workers)
        speed = median(worker.speed for worker in workers)
        refills = state.version.number <= version.number + 1
        return IdleRollout(int(slots), size / self.bytes_per_s, speed, is_wanted, refills)


@dataclass(frozen=True, slots=True)
class Reloaded(StepWithoutRoom):
    """Resumes trajectories on rollouts that first load their old version; these get no other work
    in this plan.
    """

    reload: VersionReload

    def plan(self, draft: PlanDraft) -> None:
        state, free = draft.state, draft.free
        starts = [start for start in draft.unassigned if start.kind == "start"]
        lacking = sum(len(start.trajectories) for start in starts) > sum(free.new.values())
        # A load takes slots from other work only if there is some.
        is_wanted = lacking or (bool(draft.ahead) and admissible_now(draft.pace, state) > 0)
        chosen = self.reload.plan(state, draft.lengths, draft.unassigned, is_wanted, draft.now_s)
        draft.put_off |= chosen.waiting
        for samples in draft.unassigned:
            for trajectory in samples.trajectories:
                rollout = chosen.loads.get(trajectory)
                if rollout is None:
                    continue
                for room in (free.new, free.resumes):
                    room.pop(rollout, None)
                assignment, chain = state.assignments.get(trajectory), state.chains[trajectory]
                assert chain.version is not None, "its version is loaded"
                how = {trajectory: continuation(assignment, chain, True, (chain.version,))}
                draft.assign(replace(samples, how=how), trajectory, rollout)


def idle_rollouts(state: DispatchState) -> list[str]:
    """Returns serving rollouts without any work, preemptible ones last."""
    assigned = state.assigned_counts()
    idle = [
        (seen.status.preemptible, name)
        for name, seen in state.rollouts.items()
        if seen.fresh and is_serving(seen) and not assigned[name] and not seen.status.running
    ]
    return [name for _, name in sorted(idle)]


def _tokens_left(samples: UnassignedSamples, lengths: LengthHistory, chain: PartialChain) -> float:
    expected = lengths.expected(samples.prompt, samples.group.finished)
    remaining = 0.0 if expected is None else expected.mean - chain.generated
    limit = samples.prompt.sampling.tokens_max - chain.generated
    # Longer than its prompt's history predicts, or without one, it is expected to double (a long
    # tail).
    return max(1.0, min(remaining if remaining > 0 else float(chain.generated), float(limit)))
