"""Rollouts that die and return; their trajectories resume elsewhere from their last partials.

A failure loses the tokens that no partial holds; a preemption publishes them first. Times between
two events of a rollout are exponential, drawn from the workload's seed.
"""

from dataclasses import dataclass

import numpy as np

from simulator.repacking import Repacking
from simulator.seat import Seat
from simulator.world import World


@dataclass(slots=True, eq=False)
class Faults:
    """Ends rollouts of the world and restarts them. `count` counts failures and preemptions."""

    world: World
    repacking: Repacking
    random: np.random.Generator
    count: int = 0

    def begin(self) -> None:
        """Plan the first event of each rollout."""
        for seat in self.world.seats.values():
            self._plan(seat)

    def fail(self, seat: Seat) -> None:
        """Let the rollout die at the end of its present decode step."""
        if not seat.alive:
            return
        cluster = self.world.cluster
        total = cluster.failures_per_hour + cluster.preemptions_per_hour
        sudden = self.random.random() * total < cluster.failures_per_hour
        seat.failing = "failure" if sudden else "preemption"
        seat.replica.interrupt(self.world.now)
        self.world.plan_wake(seat)

    def strike(self, seat: Seat) -> None:
        """End the rollout between two decode steps; dispatch gets all its trajectories."""
        world, sudden = self.world, seat.failing == "failure"
        self.repacking.forget(seat)
        for work in seat.replica.give_up():
            if sudden:
                tokens = work.done % world.cluster.partial_every
                work.lose(tokens)
                world.dispatching.lost_tokens += tokens
            work.attempt += 1
            world.dispatching.homeless.append(work)
        seat.alive, seat.failing, seat.pulling, seat.tokens = False, "", False, 0.0
        seat.replica.due_s = None
        self.count += 1
        world.plan(world.now + world.cluster.repair_s, "back", seat)
        world.plan_dispatch()

    def back(self, seat: Seat) -> None:
        """Restart the repaired rollout: it pulls the newest weights, then takes work."""
        seat.alive = True
        self.world.pull(seat)
        self._plan(seat)

    def _plan(self, seat: Seat) -> None:
        cluster = self.world.cluster
        per_s = (cluster.failures_per_hour + cluster.preemptions_per_hour) / 3600
        if per_s > 0:
            self.world.plan(self.world.now + self.random.exponential(1 / per_s), "fail", seat)
