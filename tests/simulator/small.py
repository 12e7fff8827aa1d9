"""A cluster small enough to compute by hand: a decode step lasts 10 ms, whatever the batch."""

from dataclasses import replace

from rollstream.producers.engines.paced.lengths import LengthDistribution, LogNormal
from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.drafting import DraftModel
from rollstream.simulator.policies import SchedulingPolicy, policy_of
from rollstream.simulator.results import SimulationResult
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, EnvironmentWaits, Workload

STEADY = Roofline(weights_s=0.01, kv_token_s=0.0, row_s=0.0, prefill_token_s=0.0)
SMALL = Cluster(
    rollouts=2,
    roofline=STEADY,
    slots=2,
    kv_capacity=10_000,
    batch_max=2,
    train_token_s=0.0,
    train_fixed_s=0.5,
    update_s=0.25,
)
JOB = Job(groups_per_step=2, steps=8, skip=3, max_lag=4, quota=2, queue_per_slot=0.0,
          dispatch_every_s=0.0)  # fmt: skip
TAILED = LogNormal(100.0, 1_000.0)
EQUAL = LogNormal(100.0, 100.0)
DRAFTS = DraftModel(found=0.6, rate=0.9, lookup_s=1e-5)
TOOLS = EnvironmentWaits(3.0, LogNormal(0.2, 2.0))


def workload(
    distribution: LengthDistribution = EQUAL,
    seed: int = 0,
    samples: int = 2,
    environment: EnvironmentWaits | None = None,
) -> Workload:
    lengths = AnswerLengths(distribution, 0.5, 1_600)
    return Workload(lengths, samples, 64, 10, seed, environment=environment)


def run(
    policy: str | SchedulingPolicy,
    distribution: LengthDistribution = EQUAL,
    job: Job = JOB,
    seed: int = 0,
    environment: EnvironmentWaits | None = None,
    **changed: object,
) -> SimulationResult:
    named = policy_of(policy) if isinstance(policy, str) else policy
    cluster = replace(SMALL, **changed)
    return simulate(cluster, job, named, workload(distribution, seed, environment=environment))
