"""Rollouts that die and return; their trajectories resume elsewhere from their last partials.

A failure loses the tokens that no partial holds; a preemption publishes them first. Times between
two events of a rollout are exponential, drawn from the workload's seed.
"""

from dataclasses import dataclass

import numpy as np

from rollstream.simulator.cluster import SimulatedRollout
from rollstream.simulator.repack import SimulatedRepack
from rollstream.simulator.world import World


@dataclass(slots=True, eq=False)
class FaultInjector:
    """Ends rollouts of the world and restarts them. `count` counts failures and preemptions."""

    world: World
    repacking: SimulatedRepack
    random: np.random.Generator
    count: int = 0

    def plan_all(self) -> None:
        """Plan the first event of each rollout."""
        for rollout in self.world.rollouts.values():
            self._plan(rollout)

    def start_failing(self, rollout: SimulatedRollout) -> None:
        """Let the rollout die at the end of its present decode step."""
        if not rollout.alive:
            return
        cluster = self.world.cluster
        total = cluster.failures_per_hour + cluster.preemptions_per_hour
        sudden = self.random.random() * total < cluster.failures_per_hour
        rollout.failing = "failure" if sudden else "preemption"
        rollout.replica.interrupt(self.world.now)
        self.world.plan_wake(rollout)

    def kill(self, rollout: SimulatedRollout) -> None:
        """End the rollout between two decode steps; dispatch gets all its trajectories."""
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
        """Restart the repaired rollout: it pulls the newest weights, then takes work."""
        rollout.alive = True
        self.world.pull(rollout)
        self._plan(rollout)

    def _plan(self, rollout: SimulatedRollout) -> None:
        cluster = self.world.cluster
        per_s = (cluster.failures_per_hour + cluster.preemptions_per_hour) / 3600
        if per_s > 0:
            self.world.plan(self.world.now + self.random.exponential(1 / per_s), "fail", rollout)
