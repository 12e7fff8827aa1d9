"""The cluster in virtual time: one heap of events, one loop, every policy.

An event is a time, a kind and what it concerns; the handlers below are all that ever happens. Equal
inputs give equal runs: ties go by the order in which events were planned, and all randomness comes
from the workload's seed.
"""

from heapq import heappop, heappush
from typing import Literal

import numpy as np

from consumers.dispatch.admit import Pace
from simulator.cluster import Cluster, Job
from simulator.dispatching import Dispatching
from simulator.faults import Faults
from simulator.foresight import Foresight
from simulator.jumps import faster
from simulator.placing import Placing
from simulator.policies import Policy
from simulator.record import Recorder
from simulator.repacking import Landing, Repacking
from simulator.replica import Replica
from simulator.result import Result
from simulator.seat import Seat
from simulator.trainer import Trainer
from simulator.work import Work
from simulator.workload import Workload
from streams.errors import ConfigurationError

Kind = Literal["wake", "trained", "visible", "dispatch", "repack", "land", "pulled", "fail", "back"]
STEP_S_MAX = 86_400.0  # virtual: longer without a step, and it will never be


def simulate(cluster: Cluster, job: Job, policy: Policy, workload: Workload) -> Result:
    """Run until the last step is trained. `ConfigurationError` where that can never happen."""
    return World(cluster, job, policy, workload).run()


class World:
    """State of one simulated run."""

    def __init__(self, cluster: Cluster, job: Job, policy: Policy, workload: Workload) -> None:
        self.cluster, self.job, self.policy = cluster, job, policy
        self.keeps = policy.on_update == "keep_version"
        lag = job.max_lag if policy.lag is None else policy.lag
        bound = lag if policy.bounded else None
        self.seats = {seat.replica.name: seat for seat in seats_of(cluster, policy)}
        outstanding = max(1, job.max_lag) * job.groups_per_step  # beside what is being trained
        waves = job.steps if job.ends else 1 << 40
        self.dispatching = Dispatching(
            cluster.slots, job, policy, workload, self.seats,
            Pace(job.groups_per_step, bound, outstanding, waves),
            Placing(policy, workload.samples, cluster.slots), Foresight(workload),
            job.quota or 2 * cluster.slots,
        )  # fmt: skip
        self.trainer = Trainer(
            job.groups_per_step, cluster.train_fixed_s, cluster.train_token_s,
            policy.early_start, self.keeps, bound if policy.strict else None,
        )  # fmt: skip
        self.recorder = Recorder(job, policy, self.seats)
        self.repacking = Repacking(self)
        self.faults = Faults(self, np.random.default_rng([workload.seed, 3]))
        self.heap: list[tuple[float, int, Kind, object]] = []
        self.events = 0
        self.now = 0.0
        self.visible = 0
        self.trainer_busy = False
        self.dispatch_planned = False

    def run(self) -> Result:
        """To the end of the last step."""
        self.plan_dispatch(0.0)
        if self.policy.repack:
            self.plan(self.cluster.repack_every_s, "repack", None)
        self.faults.begin()
        while len(self.trainer.steps) < self.job.steps:
            last_s = self.trainer.steps[-1].ended_s if self.trainer.steps else 0.0
            if not self.heap or self.heap[0][0] > last_s + STEP_S_MAX:
                raise ConfigurationError(self._stuck())
            self.now, _, kind, about = heappop(self.heap)
            self._happen(kind, about)
        return self.recorder.result(self)

    def plan(self, at_s: float, kind: Kind, about: object) -> None:
        self.events += 1
        heappush(self.heap, (at_s, self.events, kind, about))

    def plan_dispatch(self, after_s: float | None = None) -> None:
        """Dispatch looks soon: news of one moment are planned together."""
        if not self.dispatch_planned:
            self.dispatch_planned = True
            wait_s = self.job.dispatch_every_s if after_s is None else after_s
            self.plan(self.now + wait_s, "dispatch", None)

    def plan_wake(self, seat: Seat) -> None:
        if seat.replica.due_s is not None:
            self.plan(seat.replica.due_s, "wake", seat)

    def _happen(self, kind: Kind, about: object) -> None:
        if isinstance(about, Seat):
            if kind == "wake":
                if about.replica.due_s == self.now:
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
            self.plan(self.now + self.cluster.repack_every_s, "repack", None)
        else:
            assert isinstance(about, Landing)
            self.repacking.land(about)

    def _wake(self, seat: Seat) -> None:
        replica = seat.replica
        for work in replica.arrive(self.now):
            self._finish(work, seat)
        if seat.failing:
            self.faults.strike(seat)
            return
        if not self.keeps and seat.wanted > replica.version:
            self._take_in_flight(seat)
        if seat.moving is not None:
            self.repacking.leave(seat)
        replica.go_on(self.now)
        self.plan_wake(seat)
        self.emptied(seat)

    def _finish(self, work: Work, seat: Seat) -> None:
        complete = self.dispatching.finish(work, seat)
        if complete is not None:
            self.trainer.receive(work.group, complete)
            self._train()
        self.plan_dispatch()

    def emptied(self, seat: Seat) -> None:
        """A rollout that has nothing left takes the newest weights, if there are newer ones."""
        if not seat.replica.is_empty() or seat.expecting or not seat.is_open():
            return
        self.plan_dispatch()
        if self.policy.batches:
            seat.drawn = seat.kv_previous = 0
        if self.keeps and seat.replica.version < self.visible:
            self.pull(seat)

    def pull(self, seat: Seat) -> None:
        """Load the newest version that is there now; it takes no work meanwhile."""
        seat.pulling, seat.wanted = True, self.visible
        self.recorder.pulled(seat, self.now, self.cluster.update_s)
        self.plan(self.now + self.cluster.update_s, "pulled", seat)

    def _pulled(self, seat: Seat) -> None:
        if not seat.alive or not seat.pulling:
            return
        seat.pulling, seat.draining, seat.drawn, seat.kv_previous = False, False, 0, 0
        seat.replica.version = seat.wanted
        self.emptied(seat)
        self.plan_dispatch()

    def _take_in_flight(self, seat: Seat) -> None:
        recompute = self.policy.on_update == "in_flight_recompute"
        self.recorder.pulled(seat, self.now, self.cluster.update_s)
        seat.replica.update(seat.wanted, self.now, self.cluster.update_s, recompute)

    def _dispatch(self) -> None:
        self.dispatch_planned = False
        for work, seat in self.dispatching.orders():
            seat.replica.submit(work, self.now)
            self.plan_wake(seat)
            self._note_drain(seat)

    def _train(self) -> None:
        if self.trainer_busy:
            return
        taken = self.trainer.taken
        seconds = self.trainer.begin(self.now)
        self.dispatching.closed = self.trainer.expired
        if seconds is not None:
            self.dispatching.trained += self.trainer.taken - taken
            self.trainer_busy = True
            self.plan(self.now + seconds, "trained", "piece")
        self.plan_dispatch()

    def _trained(self) -> None:
        """A piece of a step, or the time that publishing takes, is over."""
        self.trainer_busy = False
        step = self.trainer.end(self.now) if self.trainer.begun_s is not None else None
        if step is not None:
            self.recorder.stepped(step, self.trainer.busy_s)
            self.plan(self.now + self.cluster.arrive_s, "visible", None)
            if self.cluster.publish_s:
                self.trainer_busy = True
                self.plan(self.now + self.cluster.publish_s, "trained", "published")
                return
        self._train()

    def _visible(self) -> None:
        """A version can be taken from now on."""
        self.visible += 1
        self.dispatching.version = self.visible
        for seat in self.seats.values():
            if self.keeps:
                self._note_drain(seat)
                self.emptied(seat)
            elif seat.alive:
                seat.wanted = self.visible
                seat.replica.interrupt(self.now)
                self.plan_wake(seat)
        if self.policy.repack:
            self.repacking.check()
        self.plan_dispatch()

    def _note_drain(self, seat: Seat) -> None:
        """From now on it only finishes what it has: its quota is drawn and a newer version out."""
        stale = self.keeps and seat.alive and seat.replica.version < self.visible
        if stale and not seat.draining and seat.drawn >= self.dispatching.quota:
            seat.draining = True
            self.recorder.drained(seat, self.now)

    def _stuck(self) -> str:
        done = len(self.trainer.steps)
        return (
            f"{self.policy.name}: no step follows step {done} of {self.job.steps} within a day: "
            f"{len(self.dispatching.groups)} groups are open, {self.trainer.expired} expired; "
            "a larger lag, fewer failures or more rollouts"
        )


def seats_of(cluster: Cluster, policy: Policy) -> list[Seat]:
    """Rollouts by name, their speeds taken in turn."""
    width = len(str(cluster.rollouts - 1))
    reserve = int(cluster.kv_reserve * cluster.kv_capacity)
    return [
        Seat(
            Replica(
                f"rollout-{index:0{width}}",
                faster(cluster.roofline, cluster.speeds[index % len(cluster.speeds)]),
                cluster.slots,
                cluster.kv_capacity,
                reserve,
                policy.by_length,
            ),
            speed=cluster.speeds[index % len(cluster.speeds)],
        )
        for index in range(cluster.rollouts)
    ]
