"""Loads a version from history for unfinished trajectories whose version no rollout holds any more,
where that is cheaper than restarting them on the newest version (invariant 4).

The assignment itself asks an idle rollout to load the version (`from_history`), so a death in
between is recovered like any other. A trajectory gets at most one load in a row: if it comes back
from one, it restarts.

Costs are counted in tokens that one slot could have generated, in two parts. Work used up: the
tokens that are generated again, against the slots that are empty while the version is loaded and,
on a rollout that gets no new work under it, until its last trajectory ends. Work delayed: the tail
ends later by the load, or by the tokens that are generated again; a wave waits for its last
trajectory, so that delay costs all slots of one rollout. Used slots cost nothing where no other
work needs them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rollstream.consumers.dispatch.admission import rollout_speeds
from rollstream.consumers.dispatch.assignments import UnassignedSamples, is_serving
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.state import DispatchState, PartialChain
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class UnheldTrajectory:
    """A trajectory whose version no rollout holds: the tokens generated so far and those still
    expected.
    """

    trajectory: str
    gained: int
    left: float


@dataclass(frozen=True, slots=True)
class IdleRollout:
    """A rollout that would load the version: `load_s` seconds for its bytes, `speed` tokens per
    second of one slot. `is_wanted`: other work needs its slots. Without `refills` it gets no new
    trajectories under that version.
    """

    slots: int
    load_s: float
    speed: float
    is_wanted: bool
    refills: bool


def trajectories_to_reload(
    unheld: Sequence[UnheldTrajectory], emptied: IdleRollout
) -> tuple[str, ...]:
    """The trajectories to load their version for, at most one per slot; empty when it is cheaper
    that all restart. The others restart.

    Slots are empty until the longest one ends, so only the choices of the n trajectories with the
    fewest expected tokens are compared; where no slot stays empty, those of the n with the most
    generated tokens.
    """

    def cheapest_first(one: UnheldTrajectory) -> tuple[float, int, str]:
        return 0.0 if emptied.refills else one.left, -one.gained, one.trajectory

    ordered = sorted(unheld, key=cheapest_first)
    choices = range(min(len(ordered), emptied.slots) + 1)
    best = min(choices, key=lambda n: (reload_cost(ordered[:n], ordered[n:], emptied), -n))
    return tuple(sorted(one.trajectory for one in ordered[:best]))


def reload_cost(
    loaded: Sequence[UnheldTrajectory], again: Sequence[UnheldTrajectory], emptied: IdleRollout
) -> float:
    """Cost of loading the version for `loaded` and restarting `again`."""
    used = float(sum(one.gained for one in again))
    waited = float(max((one.gained for one in again), default=0))
    if loaded:
        load = emptied.load_s * emptied.speed
        used += emptied.slots * 2 * load  # to the old version, and back to the newest
        if not emptied.refills:
            used += emptied.slots * max(one.left for one in loaded)
            used -= sum(one.left for one in loaded)
        waited = max(waited, load)
    return used * emptied.is_wanted + emptied.slots * waited


IDLE_WAIT_S = 15.0  # wait for an idle rollout: one that was killed is back by then


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """Trajectory → rollout that loads its version; `waiting` trajectories are assigned once a
    rollout is idle.
    """

    loads: Mapping[str, str] = field(default_factory=dict[str, str])
    waiting: frozenset[str] = frozenset()


@dataclass(slots=True)
class VersionReload:
    """`bytes_of` returns the bytes to read for a stored version, None when it was deleted
    (versions_max).
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
        """Loads for all unassigned trajectories under versions that no rollout holds, oldest
        version first.
        """
        unheld = self._unheld(state, lengths, unassigned)
        trajectories = [one.trajectory for ones in unheld.values() for one in ones]
        self._since_s = {t: self._since_s.get(t, now_s) for t in trajectories}
        if not state.rollouts:
            return ReloadPlan()
        self._bytes = {v: self._bytes[v] if v in self._bytes else self.bytes_of(v) for v in unheld}
        empty = idle_rollouts(state)
        loads: dict[str, str] = {}
        waiting: set[str] = set()
        for version, ones in sorted(unheld.items()):
            size = self._bytes[version]
            if size is None:
                continue
            name = empty[0] if empty else ""
            chosen = trajectories_to_reload(
                ones, self._emptied(state, name, version, size, is_wanted)
            )
            if name and chosen:
                loads |= dict.fromkeys(chosen, empty.pop(0))
            elif chosen:
                waiting |= {t for t in chosen if now_s - self._since_s[t] < IDLE_WAIT_S}
        return ReloadPlan(loads, frozenset(waiting))

    def _unheld(
        self, state: DispatchState, lengths: LengthHistory, unassigned: Iterable[UnassignedSamples]
    ) -> dict[Version, list[UnheldTrajectory]]:
        found: dict[Version, list[UnheldTrajectory]] = {}
        for one in unassigned:
            for trajectory in one.trajectories if one.kind == "start" else ():
                chain, assignment = state.chains.get(trajectory), state.assignments.get(trajectory)
                if chain is None or chain.version is None or self._is_hopeless(state, chain):
                    continue
                if assignment is None or not assignment.from_history:
                    left = _tokens_left(one, lengths, chain)
                    one_unheld = UnheldTrajectory(trajectory, chain.generated, left)
                    found.setdefault(chain.version, []).append(one_unheld)
        return found

    def _is_hopeless(self, state: DispatchState, chain: PartialChain) -> bool:
        """Whether invariant 5 would drop it in any case."""
        assert chain.version is not None, "checked by the caller"
        lag = state.version.number - chain.version.number
        return self.max_lag is not None and lag > self.max_lag

    def _emptied(
        self, state: DispatchState, name: str, version: Version, size: int, is_wanted: bool
    ) -> IdleRollout:
        """The named rollout; without a name a typical one (medians)."""
        workers = [w for w in rollout_speeds(state) if name in ("", w.rollout)]
        slots = median(state.rollouts[worker.rollout].status.slots for worker in workers)
        speed = median(worker.speed for worker in workers)
        refills = state.version.number <= version.number + 1
        return IdleRollout(int(slots), size / self.bytes_per_s, speed, is_wanted, refills)


def idle_rollouts(state: DispatchState) -> list[str]:
    """Serving rollouts without any work, steady ones before preemptible ones."""
    given = state.assigned_counts()
    found = [
        (seen.status.preemptible, name)
        for name, seen in state.rollouts.items()
        if seen.fresh and is_serving(seen) and not given[name] and not seen.status.running
    ]
    return [name for _, name in sorted(found)]


def _tokens_left(one: UnassignedSamples, lengths: LengthHistory, chain: PartialChain) -> float:
    """Expected tokens still to come. For an answer that exceeds its history, or has none, they
    equal the tokens so far, as in a long tail.
    """
    expected = lengths.expected(one.prompt, one.group.finished)
    left = 0.0 if expected is None else expected.mean - chain.generated
    most = one.prompt.sampling.tokens_max - chain.generated
    return max(1.0, min(left if left > 0 else float(chain.generated), float(most)))
