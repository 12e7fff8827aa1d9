"""`sim_examples_over_laminar`: each shipped example's policy over Laminar's, at equal lag, on the
example's own rollouts, slots and batch; the least of all.

The machine is that of the paced engine's defaults, lengths have their 99th percentile at the
example's limit, and the trainer needs as long for a step as rollouts with full slots, or half of
it. Neither side drafts. Laminar may have as much work outstanding as gives it no more lag.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.case import Case, alone
from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.build import roofline_from
from rollstream.producers.engines.paced.lengths import LogNormal
from rollstream.producers.engines.roofline import batch_max
from rollstream.run.config.config import load, load_layers, validate_layers
from rollstream.run.config.settings import Configuration
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.experiment import Prediction, RunPolicy, predict
from rollstream.simulator.policies import LAMINAR
from rollstream.simulator.results import SimulationResult
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, Workload
from testbed.repository import EXAMPLES

STEPS, SKIPPED = 16, 6
TRAINERS = (1.0, 0.5)  # seconds of a step's training per second of its generation
PROMPT_TOKENS, CORRELATION, PROMPTS = 64, 0.7, 1 << 14
ROUND_S, UPDATE_S = 0.05, 0.1
WAVES_MAX, HALVINGS = 12.0, 5
LAG_SLACK = 1.02
RATIO_MIN = 1.0


@dataclass(frozen=True, slots=True)
class Compared:
    """An example and a trainer: ours, and Laminar's fastest run with no more lag."""

    name: str
    trainer: float
    ours: Prediction
    laminar: SimulationResult

    @property
    def ratio(self) -> float:
        """Rounded, since both are sums of floats: where the trainer limits both they are equal."""
        return round(self.ours.tokens_per_s / self.laminar.tokens_per_s, 9)

    def words(self) -> str:
        return (
            f"{self.name} (trainer {self.trainer:g}) {self.ratio:.2f} at lag "
            f"{self.ours.lag_mean:.1f} and {self.laminar.lag_mean():.1f}"
        )


def configurations() -> Iterator[tuple[str, Configuration]]:
    """Yields the examples that are runs, and each of them under `keep_version` with its defaults;
    its own bounds are left out there.
    """
    for path in sorted(EXAMPLES.glob("*.toml")):
        try:
            shipped = load(path, (), {})
        except ConfigurationError:  # a simulation, or a model that is not on this machine
            continue
        yield path.stem, shipped
        if shipped.rollouts.on_update != "keep_version":
            yield f"{path.stem}, keep_version", _kept(shipped)


def _kept(shipped: Configuration) -> Configuration:
    """Returns a run of the example's sizes under `keep_version`, with the defaults of that
    policy.
    """
    t, r = shipped.trainer, shipped.rollouts
    sizes = (
        f"trainer.groups_per_step={t.groups_per_step}",
        f"trainer.samples_per_group={t.samples_per_group}",
        f"rollouts.count={r.count}",
        f"rollouts.slots={r.slots}",
        f"rollouts.context_max={r.context_max}",
        f"sampling.tokens_max={shipped.sampling.tokens_max}",
        "rollouts.on_update=keep_version",
    )
    return validate_layers(load_layers(None, sizes, {}))


def compared(name: str, c: Configuration, trainer: float) -> Compared:
    """Returns the example's run and Laminar's fastest one with no more lag."""
    cluster, work = machine(c, trainer), workload(c)
    bounded = c.dispatch.max_lag is not None
    job, policy = _job(c), RunPolicy(c.rollouts.on_update, c.dispatch.repack, bounded)
    ours = predict(cluster, job, work, policy, ends=False)
    return Compared(name, trainer, ours, _laminar(cluster, job, work, ours.lag_mean))


def _laminar(cluster: Cluster, job: Job, work: Workload, lag: float) -> SimulationResult:
    """Returns Laminar's fastest run whose mean lag is at most `lag`; that with one wave of work
    outstanding, the least with which it ends a step, may have more.
    """
    fair = -(-job.groups_per_step * work.samples // cluster.rollouts)

    def run(waves: float) -> SimulationResult:
        ready = round(waves * job.groups_per_step)
        here = replace(job, quota=fair, ready_groups_max=ready, dispatch_every_s=ROUND_S)
        return simulate(cluster, here, LAMINAR, work)

    found, low, high = run(1.0), 1.0, WAVES_MAX
    for _ in range(HALVINGS):
        waves = (low + high) / 2
        result = run(waves)
        if result.lag_mean() > LAG_SLACK * lag:
            high = waves
            continue
        low = waves
        found = max(found, result, key=lambda one: one.tokens_per_s)
    return found


def machine(c: Configuration, trainer: float) -> Cluster:
    """Returns the example's rollouts as machines of the paced engine, and a trainer."""
    roofline, slots = roofline_from(c.paced.roofline), c.rollouts.slots
    drawn = np.random.default_rng(0).standard_normal(4096)
    mean = float(workload(c).lengths.from_deviates(drawn).mean())
    kv = slots * (PROMPT_TOKENS + mean / 2)
    generated = c.rollouts.count * slots / roofline.step_s(slots, kv)
    return Cluster(
        rollouts=c.rollouts.count,
        roofline=roofline,
        slots=slots,
        kv_capacity=c.paced.kv_tokens or slots * (PROMPT_TOKENS + c.sampling.tokens_max),
        batch_max=batch_max(roofline, slots),
        train_token_s=trainer / generated,
        train_fixed_s=0.0,
        update_s=UPDATE_S,
        repack_every_s=c.dispatch.repack_every_s,
    )


def workload(c: Configuration) -> Workload:
    longest = c.sampling.tokens_max
    lengths = AnswerLengths(LogNormal(longest / 10, longest), CORRELATION, longest)
    return Workload(lengths, c.trainer.samples_per_group, PROMPTS, PROMPT_TOKENS, seed=0)


def _job(c: Configuration) -> Job:
    unbounded = c.dispatch.max_lag is None
    return Job(
        groups_per_step=c.trainer.groups_per_step,
        steps=STEPS,
        skip=SKIPPED,
        max_lag=4 if unbounded else c.dispatch.max_lag or 0,
        quota=c.rollouts.quota or 0,
        queue_per_slot=c.dispatch.queue_per_slot,
        micro_batch_tokens=c.trainer.micro_batch_tokens,
        ready_groups_max=c.dispatch.ready_groups_max,
    )


def cases() -> Iterator[Case]:
    found = [compared(name, c, t) for name, c in configurations() for t in TRAINERS]
    worst = min(found, key=lambda one: one.ratio)
    note = f"least: {worst.words()}; {'; '.join(one.words() for one in found)}"
    yield alone("sim_examples_over_laminar", worst.ratio, "×", at_least=RATIO_MIN, note=note)
