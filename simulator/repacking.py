"""Repack and the migration of outliers: the service's plans over values of the simulator, and the
time that their execution takes.

The check runs every few seconds and after each version, as in Laminar. A move starts between two
decode steps of its source; the moved trajectories stand still for `move_s` and are prefilled again.
"""

from collections import Counter
from dataclasses import dataclass, field

from consumers.dispatch.outliers import UNFINISHED_MAX, Running, plan_outliers
from consumers.dispatch.repack import Load, plan_repack
from consumers.dispatch.tempo import Budget, Steps, budget_of
from simulator.seat import Seat
from simulator.work import Work
from simulator.world import World
from streams.records import Version

AGAIN = ""  # in place of a target: the trajectory restarts


@dataclass(frozen=True, slots=True)
class Landing:
    """Moved trajectories that arrive at `target`."""

    target: str
    works: tuple[Work, ...]


@dataclass(slots=True, eq=False)
class Repacking:
    """Plans moves and counts them. `deferred` counts trajectories that restart instead."""

    world: World
    moves: int = 0
    moved: int = 0
    deferred: int = 0
    steps: Steps = field(default_factory=Steps)

    def check(self) -> None:
        """Plan from the rollouts' present status, and ask the sources to give trajectories up."""
        world = self.world
        self.steps.saw(world.visible, world.now)
        loads = [self._load(seat) for seat in world.seats.values()]
        for seat, load in zip(world.seats.values(), loads, strict=True):
            before = seat.kv_previous if world.policy.peak else 0
            seat.kv_previous = max(before, load.kv_used)
        moves = plan_repack(loads, world.keeps) if world.policy.repack else ()
        for move in moves:
            source = world.seats[move.source]
            source.moving = dict.fromkeys(source.replica.running, move.destination)
            self._ask(source)
        if world.policy.migrate:
            taking = {move.destination for move in moves}
            self._gather([load for load in loads if load.rollout not in taking])

    def leave(self, seat: Seat) -> None:
        """Between two decode steps of the source: send the trajectories that still run on their
        way.
        """
        world, asked = self.world, seat.moving or {}
        seat.moving = None
        by_target: dict[str, list[Work]] = {}
        for name, target in asked.items():
            if name in seat.replica.running:
                work = seat.replica.take_out(name)
                seat.tokens -= work.predicted
                by_target.setdefault(target, []).append(work)
        for work in by_target.pop(AGAIN, []):
            self.deferred += 1
            world.dispatching.drop(work)
            world.dispatching.homeless.append(work)
        for target, works in by_target.items():
            self.moves += 1
            self.moved += len(works)
            for work in works:
                work.moves += 1
                work.attempt += 1
            world.recorder.moved(seat, world.seats[target], world.now, world.cluster.move_s)
            world.plan(world.now + world.cluster.move_s, "land", Landing(target, tuple(works)))
        self._unexpect(asked, {t: len(works) for t, works in by_target.items()})

    def land(self, landing: Landing) -> None:
        """Resume the trajectories at their target if it is open and holds their version; otherwise
        dispatch places them.
        """
        world, seat = self.world, self.world.seats[landing.target]
        seat.expecting -= len(landing.works)
        for work in landing.works:
            fits = not world.keeps or work.version == seat.replica.version
            if seat.is_open() and fits:
                world.dispatching.give(work, seat)
                seat.replica.submit(work, world.now)
            else:
                world.dispatching.homeless.append(work)
        world.plan_wake(seat)
        world.emptied(seat)
        world.plan_dispatch()

    def forget(self, seat: Seat) -> None:
        """Cancel the moves of a source that died before it gave trajectories up."""
        if seat.moving is not None:
            self._unexpect(seat.moving, {})
            seat.moving = None

    def _ask(self, source: Seat) -> None:
        assert source.moving is not None
        for target in source.moving.values():
            if target != AGAIN:
                self.world.seats[target].expecting += 1
        source.replica.interrupt(self.world.now)
        self.world.plan_wake(source)

    def _unexpect(self, asked: dict[str, str], left: dict[str, int]) -> None:
        """Correct what the targets expect by the trajectories that finished meanwhile."""
        for target, count in Counter(asked.values()).items():
            if target == AGAIN:
                continue
            seat = self.world.seats[target]
            seat.expecting -= count - left.get(target, 0)
            self.world.emptied(seat)

    def _load(self, seat: Seat) -> Load:
        replica = seat.replica
        return Load(
            rollout=replica.name,
            version=Version(replica.version, 0),
            running=len(replica.running),
            waiting=len(replica.waiting) + seat.expecting,
            kv_used=replica.look(self.world.now),
            kv_previous=seat.kv_previous,
            kv_capacity=replica.capacity,
            batch_max=self.world.cluster.batch_max,
            ready=seat.is_open(),
            gains=self.world.dispatching.gains(seat),
        )

    def _gather(self, loads: list[Load]) -> None:
        """Plan outliers of waves that are nearly done. Rollouts that take part in a repack are left
        out.
        """
        seats = self.world.seats
        free = [load for load in loads if seats[load.rollout].is_open()]
        running = {one.trajectory: one for one in self._running()}
        plan = plan_outliers(list(running.values()), free, self._budget())
        asked: dict[str, dict[str, str]] = {}
        for name, target in {**plan.moves, **dict.fromkeys(plan.deferred, AGAIN)}.items():
            asked.setdefault(running[name].rollout, {})[name] = target
        for source, names in asked.items():
            seats[source].moving = names
            self._ask(seats[source])

    def _budget(self) -> Budget | None:
        """The time budget of a trajectory that starts now. A request's speed is that of the present
        batches on rollouts of the newest version.
        """
        world = self.world
        speeds = [
            1 / seat.replica.roofline.step_s(rows, seat.replica.look(world.now))
            for seat in world.seats.values()
            if seat.replica.version == world.visible and (rows := len(seat.replica.running))
        ]
        return budget_of(world.dispatching.pace.max_lag, self.steps.lasts_s, speeds)

    def _running(self) -> list[Running]:
        """Running trajectories of waves with a small unfinished share; no others can be
        outliers.
        """
        world, found = self.world, list[Running]()
        late = {w: s for w, s in world.dispatching.unfinished().items() if s <= UNFINISHED_MAX}
        for seat in world.seats.values() if late else ():
            if not seat.is_open():
                continue
            steps = seat.replica.steps_by(world.now)
            for work in seat.replica.running.values():
                if work.wave in late:
                    tokens, share = steps - work.begun, late[work.wave]
                    found.append(world.dispatching.running(work, seat, tokens, share))
        return found
