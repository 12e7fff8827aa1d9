"""The loop of the simulator, over the events of the `World`. Equal inputs give equal runs: all
randomness comes from the workload's seed.
"""

from dataclasses import dataclass

import numpy as np

from rollstream.errors import ConfigurationError
from rollstream.simulator.cluster import Cluster, Job, SimulatedRollout
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.repack import ArrivingMove, SimulatedRepack
from rollstream.simulator.results import SimulationResult
from rollstream.simulator.workload import SimulatedTrajectory, Workload
from rollstream.simulator.world import Kind, World


@dataclass(slots=True, eq=False)
class FaultInjector:
    """Kills rollouts at exponential intervals and restarts them. A failure loses the tokens that no
    partial holds; a preemption publishes them first. `count` counts both.
    """

    world: World
    repacking: SimulatedRepack
    random: np.random.Generator
    count: int = 0

    def plan_all(self) -> None:
        for rollout in self.world.rollouts.values():
            self._plan(rollout)

    def start_failing(self, rollout: SimulatedRollout) -> None:
        """It dies at the end of its present decode step."""
        if not rollout.alive:
            return
        cluster = self.world.cluster
        total = cluster.failures_per_hour + cluster.preemptions_per_hour
        sudden = self.random.random() * total < cluster.failures_per_hour
        rollout.failing = "failure" if sudden else "preemption"
        rollout.replica.interrupt(self.world.now)
        self.world.plan_wake(rollout)

    def kill(self, rollout: SimulatedRollout) -> None:
        """Ends the rollout between two decode steps; dispatch gets all its trajectories."""
        world, sudden = self.world, rollout.failing == "failure"
        self.repacking.cancel(rollout)
        for trajectory in rollout.replica.remove_all():
            if sudden:
                tokens = trajectory.done % world.cluster.partial_every
                trajectory.remove_newest(tokens)
                world.dispatching.lost_tokens += tokens
            trajectory.attempt += 1
            world.dispatching.unassigned.append(trajectory)
        rollout.alive, rollout.failing, rollout.pulling, rollout.tokens = False, "", False, 0.0
        rollout.replica.due_s = None
        self.count += 1
        world.plan(world.now + world.cluster.repair_s, "back", rollout)
        world.plan_dispatch()

    def restart(self, rollout: SimulatedRollout) -> None:
        rollout.alive = True
        self.world.pull(rollout)
        self._plan(rollout)

    def _plan(self, rollout: SimulatedRollout) -> None:
        cluster = self.world.cluster
        per_s = (cluster.failures_per_hour + cluster.preemptions_per_hour) / 3600
        if per_s > 0:
            self.world.plan(self.world.now + self.random.exponential(1 / per_s), "fail", rollout)


STEP_S_MAX = 86_400.0  # virtual seconds without a step, after which the run counts as stuck


def simulate(
    cluster: Cluster, job: Job, policy: SchedulingPolicy, workload: Workload
) -> SimulationResult:
    """Runs until the last step is trained. Raises `ConfigurationError` if a step cannot
    complete.
    """
    return Simulation(World(cluster, job, policy, workload)).run()


class Simulation:
    def __init__(self, world: World) -> None:
        self.world = world
        self.repacking = SimulatedRepack(world)
        random = np.random.default_rng([world.dispatching.workload.seed, 3])
        self.faults = FaultInjector(world, self.repacking, random)
        self.trainer_busy = False
        world.plan_dispatch(0.0)
        if world.policy.repack:
            world.plan(world.cluster.repack_every_s, "repack", None)
        self.faults.plan_all()

    def run(self) -> SimulationResult:
        while self.advance():
            pass
        world = self.world
        return world.recorder.result(
            world.now, self.repacking.moves, self.repacking.moved, self.faults.count
        )

    def advance(self) -> bool:
        """Handles the next event; False once the last step has ended. Raises `ConfigurationError`
        if a step cannot complete.
        """
        world, steps = self.world, self.world.trainer.steps
        if len(steps) >= world.job.steps:
            return False
        last_s = steps[-1].ended_s if steps else 0.0
        next_s = world.next_event_s()
        if next_s is None or next_s > last_s + STEP_S_MAX:
            raise ConfigurationError(self._stuck())
        self._handle(*world.pop_event())
        return True

    def _handle(self, kind: Kind, subject: object) -> None:
        world = self.world
        if isinstance(subject, SimulatedRollout):
            if kind == "wake":
                if subject.replica.due_s == world.now:
                    self._wake(subject)
            elif kind == "pulled":
                self._pulled(subject)
            elif kind == "fail":
                self.faults.start_failing(subject)
            else:
                self.faults.restart(subject)
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
            assert isinstance(subject, ArrivingMove)
            self.repacking.receive(subject)

    def _wake(self, rollout: SimulatedRollout) -> None:
        world, replica = self.world, rollout.replica
        for trajectory in replica.finish_jump(world.now):
            self._finish(trajectory, rollout)
        if rollout.failing:
            self.faults.kill(rollout)
            return
        if not world.policy.drains and rollout.wanted > replica.version:
            self._take_in_flight(rollout)
        if rollout.moving is not None:
            self.repacking.send(rollout)
        replica.start_jump(world.now)
        world.plan_wake(rollout)
        world.check_empty(rollout)

    def _finish(self, trajectory: SimulatedTrajectory, rollout: SimulatedRollout) -> None:
        complete = self.world.dispatching.finish(trajectory, rollout)
        if complete is not None:
            self.world.trainer.receive(trajectory.group, complete)
            self._train()
        self.world.plan_dispatch()

    def _pulled(self, rollout: SimulatedRollout) -> None:
        if not rollout.alive or not rollout.pulling:
            return
        rollout.pulling, rollout.draining, rollout.drawn, rollout.kv_previous = False, False, 0, 0
        rollout.replica.version = rollout.wanted
        self.world.check_empty(rollout)
        self.world.plan_dispatch()

    def _take_in_flight(self, rollout: SimulatedRollout) -> None:
        world = self.world
        recompute = world.policy.on_update == "in_flight_recompute"
        stall_s = world.pull_s(rollout)
        world.recorder.note_pull(rollout, world.now, stall_s)
        rollout.replica.update(rollout.wanted, world.now, stall_s, recompute)

    def _dispatch(self) -> None:
        world = self.world
        world.dispatch_planned = False
        for trajectory, rollout in world.dispatching.assignments():
            rollout.replica.submit(trajectory, world.now)
            world.plan_wake(rollout)
            self._note_drain(rollout)

    def _train(self) -> None:
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
        self.trainer_busy = False
        world, trainer = self.world, self.world.trainer
        step = trainer.end(world.now) if trainer.begun_s is not None else None
        if step is not None:
            world.recorder.note_step(step, trainer.busy_s)
            world.plan(world.now + world.cluster.arrive_s, "visible", None)
            if world.cluster.publish_s:
                self.trainer_busy = True
                world.plan(world.now + world.cluster.publish_s, "trained", "published")
                return
        self._train()

    def _visible(self) -> None:
        world = self.world
        world.visible_version += 1
        world.dispatching.version = world.visible_version
        for rollout in world.rollouts.values():
            if world.policy.drains:
                self._note_drain(rollout)
                world.check_empty(rollout)
            elif rollout.alive:
                rollout.wanted = world.visible_version
                rollout.replica.interrupt(world.now)
                world.plan_wake(rollout)
        if world.policy.repack:
            self.repacking.check()
        world.plan_dispatch()

    def _note_drain(self, rollout: SimulatedRollout) -> None:
        world = self.world
        stale = rollout.alive and rollout.replica.version < world.visible_version
        if (
            world.policy.drains
            and stale
            and not rollout.draining
            and rollout.drawn >= world.dispatching.quota
        ):
            rollout.draining = True
            world.recorder.note_drain_start(rollout, world.now)

    def _stuck(self) -> str:
        world = self.world
        done = len(world.trainer.steps)
        return (
            f"{world.policy.name}: no step follows step {done} of {world.job.steps} within a day: "
            f"{len(world.dispatching.groups)} groups are open, {world.trainer.expired} expired; "
            "a larger lag, fewer failures or more rollouts"
        )
