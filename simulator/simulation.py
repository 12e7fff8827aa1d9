"""The loop of the simulator: takes event after event and lets the parts of the world react.

Equal inputs give equal runs: the event queue breaks ties by planning order, and all randomness
comes from the workload's seed.
"""

import numpy as np

from simulator.cluster import Cluster, Job
from simulator.faults import Faults
from simulator.policies import Policy
from simulator.repacking import Landing, Repacking
from simulator.result import Result
from simulator.seat import Seat
from simulator.work import Work
from simulator.workload import Workload
from simulator.world import Kind, World
from streams.errors import ConfigurationError

STEP_S_MAX = 86_400.0  # virtual seconds without a step, after which the run counts as stuck


def simulate(cluster: Cluster, job: Job, policy: Policy, workload: Workload) -> Result:
    """Run until the last step is trained. Raises `ConfigurationError` if a step cannot complete."""
    return Simulation(World(cluster, job, policy, workload)).run()


class Simulation:
    """One run of a world; every policy runs through the same handlers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.repacking = Repacking(world)
        random = np.random.default_rng([world.dispatching.workload.seed, 3])
        self.faults = Faults(world, self.repacking, random)
        self.trainer_busy = False

    def run(self) -> Result:
        """Simulate to the end of the last step."""
        world = self.world
        world.plan_dispatch(0.0)
        if world.policy.repack:
            world.plan(world.cluster.repack_every_s, "repack", None)
        self.faults.begin()
        steps = world.trainer.steps
        while len(steps) < world.job.steps:
            last_s = steps[-1].ended_s if steps else 0.0
            next_s = world.next_event_s()
            if next_s is None or next_s > last_s + STEP_S_MAX:
                raise ConfigurationError(self._stuck())
            self._happen(*world.pop_event())
        return world.recorder.result(
            world.now, self.repacking.moves, self.repacking.moved, self.faults.count
        )

    def _happen(self, kind: Kind, about: object) -> None:
        world = self.world
        if isinstance(about, Seat):
            if kind == "wake":
                if about.replica.due_s == world.now:
                    self._wake(about)
            elif kind == "pulled":
                self._pulled(about)
            elif kind == "fail":
                self.faults.fail(about)
            else:
                self.faults.back(about)
        elif kind == "dispatch":
            self._dispatch()
        elif kind == "trained":
            self._trained()
        elif kind == "visible":
            self._visible()
        elif kind == "repack":
            self.repacking.check()
            world.plan(world.now + world.cluster.repack_every_s, "repack", None)
        else:
            assert isinstance(about, Landing)
            self.repacking.land(about)

    def _wake(self, seat: Seat) -> None:
        """Handle the end of the replica's present jump: completions, failure, update, moves."""
        world, replica = self.world, seat.replica
        for work in replica.arrive(world.now):
            self._finish(work, seat)
        if seat.failing:
            self.faults.strike(seat)
            return
        if not world.keeps and seat.wanted > replica.version:
            self._take_in_flight(seat)
        if seat.moving is not None:
            self.repacking.leave(seat)
        replica.go_on(world.now)
        world.plan_wake(seat)
        world.emptied(seat)

    def _finish(self, work: Work, seat: Seat) -> None:
        complete = self.world.dispatching.finish(work, seat)
        if complete is not None:
            self.world.trainer.receive(work.group, complete)
            self._train()
        self.world.plan_dispatch()

    def _pulled(self, seat: Seat) -> None:
        """The rollout has loaded the version that it pulled."""
        if not seat.alive or not seat.pulling:
            return
        seat.pulling, seat.draining, seat.drawn, seat.kv_previous = False, False, 0, 0
        seat.replica.version = seat.wanted
        self.world.emptied(seat)
        self.world.plan_dispatch()

    def _take_in_flight(self, seat: Seat) -> None:
        world = self.world
        recompute = world.policy.on_update == "in_flight_recompute"
        world.recorder.pulled(seat, world.now, world.cluster.update_s)
        seat.replica.update(seat.wanted, world.now, world.cluster.update_s, recompute)

    def _dispatch(self) -> None:
        world = self.world
        world.dispatch_planned = False
        for work, seat in world.dispatching.orders():
            seat.replica.submit(work, world.now)
            world.plan_wake(seat)
            self._note_drain(seat)

    def _train(self) -> None:
        """Start the trainer's next piece of work if the trainer is free and can start it."""
        if self.trainer_busy:
            return
        world, trainer = self.world, self.world.trainer
        taken = trainer.taken
        seconds = trainer.begin(world.now)
        world.dispatching.closed = trainer.expired
        if seconds is not None:
            world.dispatching.trained += trainer.taken - taken
            self.trainer_busy = True
            world.plan(world.now + seconds, "trained", "piece")
        world.plan_dispatch()

    def _trained(self) -> None:
        """A piece of a step, or the time that publishing takes, is over."""
        self.trainer_busy = False
        world, trainer = self.world, self.world.trainer
        step = trainer.end(world.now) if trainer.begun_s is not None else None
        if step is not None:
            world.recorder.stepped(step, trainer.busy_s)
            world.plan(world.now + world.cluster.arrive_s, "visible", None)
            if world.cluster.publish_s:
                self.trainer_busy = True
                world.plan(world.now + world.cluster.publish_s, "trained", "published")
                return
        self._train()

    def _visible(self) -> None:
        """From now on rollouts can take one more version."""
        world = self.world
        world.visible += 1
        world.dispatching.version = world.visible
        for seat in world.seats.values():
            if world.keeps:
                self._note_drain(seat)
                world.emptied(seat)
            elif seat.alive:
                seat.wanted = world.visible
                seat.replica.interrupt(world.now)
                world.plan_wake(seat)
        if world.policy.repack:
            self.repacking.check()
        world.plan_dispatch()

    def _note_drain(self, seat: Seat) -> None:
        """Mark a rollout as draining: its quota is drawn and a newer version is visible."""
        world = self.world
        stale = world.keeps and seat.alive and seat.replica.version < world.visible
        if stale and not seat.draining and seat.drawn >= world.dispatching.quota:
            seat.draining = True
            world.recorder.drained(seat, world.now)

    def _stuck(self) -> str:
        world = self.world
        done = len(world.trainer.steps)
        return (
            f"{world.policy.name}: no step follows step {done} of {world.job.steps} within a day: "
            f"{len(world.dispatching.groups)} groups are open, {world.trainer.expired} expired; "
            "a larger lag, fewer failures or more rollouts"
        )
