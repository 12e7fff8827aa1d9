"""Repack and the migration of outliers: the service's plans over values of the simulator, and how
long it takes to follow them.

Laminar's check is every few seconds and after each version. A plan is followed between two decode
steps of the rollout that gives up; what it had stands still for `move_s`, then is prefilled anew.
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

AGAIN = ""  # instead of a rollout: it starts again


@dataclass(frozen=True, slots=True)
class Landing:
    """Trajectories that go on at `target`."""

    target: str
    works: tuple[Work, ...]


@dataclass(slots=True, eq=False)
class Repacking:
    """Plans, and the trajectories that are on their way."""

    world: World
    moves: int = 0
    moved: int = 0
    deferred: int = 0
    steps: Steps = field(default_factory=Steps)

    def check(self) -> None:
        """Plan from what the rollouts' status says now, and ask the sources to give up."""
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
        """Between two steps of the source: what still runs is on its way."""
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
        """They go on, if their rollout is still there under their version; else anywhere."""
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
        """The source died before it gave up."""
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
        """Those that finished meanwhile do not come."""
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
        """Outliers of waves that are nearly done; who plans to give up all is left out."""
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
        """What starts now has; a request's speed is what the rollouts of the newest version make
        of their batches.
        """
        world = self.world
        speeds = [
            1 / seat.replica.roofline.step_s(rows, seat.replica.look(world.now))
            for seat in world.seats.values()
            if seat.replica.version == world.visible and (rows := len(seat.replica.running))
        ]
        return budget_of(world.dispatching.pace.max_lag, self.steps.lasts_s, speeds)

    def _running(self) -> list[Running]:
        """Of waves of which little is unfinished: nothing else can be an outlier."""
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
