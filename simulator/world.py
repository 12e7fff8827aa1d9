"""State and event queue of one simulated run. Events at equal times happen in the order in which
they were planned.
"""

from heapq import heappop, heappush
from typing import Literal

from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.kinds import speed_kinds
from rollstream.simulator.cache import KvCache
from rollstream.simulator.cluster import Cluster, Job, SimulatedRollout
from rollstream.simulator.dispatch import LengthForecast, SimulatedDispatch, WavePlacement
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.replica import Replica, scaled_roofline
from rollstream.simulator.results import SimulatedTrainer, SimulationRecorder
from rollstream.simulator.workload import Workload

Kind = Literal["wake", "trained", "visible", "dispatch", "repack", "land", "pulled", "fail", "back"]
"""`wake`, a rollout's engine reaches its next change; `trained`, the trainer ends a part of a step
or its publishing; `visible`, rollouts can take the next version; `dispatch` and `repack`, a round
of each; `land`, moved trajectories arrive; `pulled`, a rollout has loaded its version; `fail`, a
rollout dies after its present decode step; `back`, it restarts.
"""


class World:
    """`now` is virtual time in seconds."""

    def __init__(
        self, cluster: Cluster, job: Job, policy: SchedulingPolicy, workload: Workload
    ) -> None:
        self.cluster, self.job, self.policy = cluster, job, policy
        lag = job.max_lag if policy.lag is None else policy.lag
        bound = lag if policy.bounded else None
        holds = workload.environment is None or workload.environment.holds_kv
        rollouts = rollouts_of(cluster, policy, holds)
        self.rollouts = {rollout.replica.name: rollout for rollout in rollouts}
        self.hosts = {
            rollout.replica.name: index // cluster.rollouts_per_host
            for index, rollout in enumerate(rollouts)
        }
        self.links_free_s: dict[int, float] = {}
        """By host, when the pulls so far leave its link."""
        waves_ready = max(1, job.max_lag) * job.groups_per_step  # besides the groups in training
        outstanding = job.ready_groups_max or waves_ready
        waves = job.steps if job.ends else 1 << 40
        self.dispatching = SimulatedDispatch(
            cluster.slots, job, policy, workload, self.rollouts,
            AdmissionPace(job.groups_per_step, bound, outstanding, waves),
            WavePlacement(policy, workload.samples, cluster.slots), LengthForecast(workload),
            job.quota or 2 * cluster.slots,
        )  # fmt: skip
        self.trainer = SimulatedTrainer(
            job.groups_per_step, cluster.train_fixed_s, cluster.train_token_s,
            policy.early_start,
            bound if policy.strict else None, job.micro_batch_tokens,
        )  # fmt: skip
        self.recorder = SimulationRecorder(
            cluster, job, policy, self.rollouts, self.dispatching, self.trainer
        )
        self.heap: list[tuple[float, int, Kind, object]] = []
        self.events = 0
        self.now = 0.0
        self.visible_version = 0
        self.dispatch_planned = False

    def plan(self, at_s: float, kind: Kind, subject: object) -> None:
        """`subject` is the object that the event concerns."""
        self.events += 1
        heappush(self.heap, (at_s, self.events, kind, subject))

    def next_event_s(self) -> float | None:
        return self.heap[0][0] if self.heap else None

    def pop_event(self) -> tuple[Kind, object]:
        self.now, _, kind, subject = heappop(self.heap)
        return kind, subject

    def plan_dispatch(self, after_s: float | None = None) -> None:
        """Plans a round after `after_s` (by default the job's interval), unless a round is planned
        already.
        """
        if not self.dispatch_planned:
            self.dispatch_planned = True
            wait_s = self.job.dispatch_every_s if after_s is None else after_s
            self.plan(self.now + wait_s, "dispatch", None)

    def plan_wake(self, rollout: SimulatedRollout) -> None:
        if rollout.replica.due_s is not None:
            self.plan(rollout.replica.due_s, "wake", rollout)

    def check_empty(self, rollout: SimulatedRollout) -> None:
        """If the rollout has no work left, plans a dispatch round for it, begins its next batch,
        and under `keep_version` lets it pull a newer version.
        """
        if not rollout.replica.is_empty() or rollout.expecting or not rollout.is_open():
            return
        self.plan_dispatch()
        if self.policy.batches:
            rollout.drawn = rollout.kv_previous = 0
        if self.policy.drains and rollout.replica.version < self.visible_version:
            self.pull(rollout)

    def pull(self, rollout: SimulatedRollout) -> None:
        """The rollout takes no work until the newest version is loaded."""
        rollout.pulling, rollout.wanted = True, self.visible_version
        lasts_s = self.pull_s(rollout)
        self.recorder.note_pull(rollout, self.now, lasts_s)
        self.plan(self.now + lasts_s, "pulled", rollout)

    def pull_s(self, rollout: SimulatedRollout) -> float:
        host = self.hosts[rollout.replica.name]
        free_s = max(self.now, self.links_free_s.get(host, 0.0)) + self.cluster.host_pull_s
        self.links_free_s[host] = free_s
        # As long as the rollout's own link needs, and until its host's link is behind the earlier
        # pulls.
        return max(self.cluster.update_s, free_s - self.now)


def rollouts_of(
    cluster: Cluster, policy: SchedulingPolicy, holds_kv: bool = True
) -> list[SimulatedRollout]:
    """Entries of `speeds` and `kv_shares` repeat in order. With `holds_kv` trajectories that wait
    for their environment stay in the cache.
    """
    width = len(str(cluster.rollouts - 1))
    speeds = [cluster.speeds[n % len(cluster.speeds)] for n in range(cluster.rollouts)]
    kinds = speed_kinds(speeds)
    rollouts: list[SimulatedRollout] = []
    for index, speed in enumerate(speeds):
        share = cluster.kv_shares[index % len(cluster.kv_shares)]
        capacity = int(share * cluster.kv_capacity)
        replica = Replica(
            f"rollout-{index:0{width}}",
            scaled_roofline(cluster.roofline, speed),
            cluster.slots,
            capacity,
            int(cluster.kv_reserve * capacity),
            policy.by_length,
            KvCache(policy.prefix),
            cluster.drafts if policy.drafts else None,
            holds_kv,
            policy.adapters,
        )
        speed_and_kind = (speed, kinds[index]) if policy.by_speed else (1.0, 0)
        rollouts.append(SimulatedRollout(replica, *speed_and_kind))
    return rollouts
