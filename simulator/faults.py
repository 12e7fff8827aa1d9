"""Rollouts that die and come back: the homeless trajectories go on from their last partial.

A failure loses what no partial had; a preemption drains them first. Times between two of a rollout
are exponential, drawn from the workload's seed.
"""

from dataclasses import dataclass

import numpy as np

from simulator.repacking import Repacking
from simulator.seat import Seat
from simulator.world import World


@dataclass(slots=True, eq=False)
class Faults:
    """Strikes rollouts of the world, and brings them back."""

    world: World
    repacking: Repacking
    random: np.random.Generator
    count: int = 0

    def begin(self) -> None:
        for seat in self.world.seats.values():
            self._plan(seat)

    def fail(self, seat: Seat) -> None:
        """Its time has come: it dies at the end of the step that runs."""
        if not seat.alive:
            return
        cluster = self.world.cluster
        total = cluster.failures_per_hour + cluster.preemptions_per_hour
        sudden = self.random.random() * total < cluster.failures_per_hour
        seat.failing = "failure" if sudden else "preemption"
        seat.replica.interrupt(self.world.now)
        self.world.plan_wake(seat)

    def strike(self, seat: Seat) -> None:
        """Between two steps: everything that it has is nobody's."""
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
        """Repaired: it takes the newest weights, then work."""
        seat.alive = True
        self.world.pull(seat)
        self._plan(seat)

    def _plan(self, seat: Seat) -> None:
        cluster = self.world.cluster
        per_s = (cluster.failures_per_hour + cluster.preemptions_per_hour) / 3600
        if per_s > 0:
            self.world.plan(self.world.now + self.random.exponential(1 / per_s), "fail", seat)
