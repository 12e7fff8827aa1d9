"""The simulator's prediction of a real run, from its configuration and its work, on a machine that
is calibrated by another run.

A step of a real engine lasts longer while a trainer computes beside it than alone (as in
`rollstream profile`), since caches and memory are shared. The factor comes from the calibration
run: its seconds of decoding per token over those that its own profile predicts.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulator.observed import Overheads, Real
from rollstream.producers.engines.paced.build import lengths_from, roofline_from
from rollstream.producers.engines.paced.lengths import LengthTrace
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.run.roles.rollout import measure_profile
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.experiment import Prediction, RunPolicy, predict
from rollstream.simulator.replica import scaled_roofline
from rollstream.simulator.workload import AnswerLengths, RecordedWorkload

PROMPTS = 1 << 20  # of the quickstart: no prompt comes twice
CORRELATION = 0.7  # of answers to one prompt
PROFILED_SLOTS = 96  # no predicted run has more


@dataclass(frozen=True, slots=True)
class Machine:
    """Wall-clock seconds of a decode step, and of everything beside decoding."""

    roofline: Roofline
    overheads: Overheads


def machine_of(real: Real, base: Path) -> Machine:
    """Returns the machine of this run."""
    c = real.configuration
    if c.rollouts.engine == "paced":
        paced = scaled_roofline(roofline_from(c.paced.roofline), c.paced.time_scale)
        return Machine(paced, real.overheads)
    many = c.rollouts.model_copy(update={"slots": PROFILED_SLOTS})
    most = c.model_copy(update={"rollouts": many})
    alone = measure_profile(most, base / "profile", lambda point: None).roofline
    expected = expected_of(real, Machine(alone, real.overheads))
    longer = _busy_s(real.found) / _busy_s(expected)
    return Machine(scaled_roofline(alone, 1 / longer), real.overheads)


def expected_of(real: Real, on: Machine) -> Prediction:
    """Returns the predicted measurements of this run."""
    c = real.configuration
    run = _cluster(real, on), _job(real), _workload(real)
    bounded = c.dispatch.max_lag is not None
    found = predict(*run, RunPolicy(c.rollouts.on_update, c.dispatch.repack, bounded))
    # In the simulator steps follow each other at once; time between two is idle, not decoding.
    return replace(found, idle_share=1 - (1 - found.idle_share) * on.overheads.decoding)


def _busy_s(run: Prediction) -> float:
    """Seconds of decoding per trained token."""
    return (1 - run.idle_share) / run.tokens_per_s


def _cluster(real: Real, on: Machine) -> Cluster:
    c, slots = real.configuration, real.configuration.rollouts.slots
    roofline = scaled_roofline(on.roofline, on.overheads.decoding)
    cluster = Cluster(
        rollouts=c.rollouts.count,
        roofline=roofline,
        slots=slots,
        kv_capacity=slots * c.rollouts.context_max,
        batch_max=batch_max(roofline, slots),
        train_token_s=on.overheads.train_token_s,
        train_fixed_s=0.0,
        update_s=on.overheads.update_s,
        arrive_s=on.overheads.publish_s,
        repack_every_s=c.dispatch.repack_every_s,
    )
    if c.rollouts.engine != "paced":
        return cluster
    return replace(
        cluster,
        kv_capacity=c.paced.kv_tokens or cluster.kv_capacity,
        train_token_s=c.paced.train_token_s / c.paced.time_scale,
        train_fixed_s=c.paced.train_step_s / c.paced.time_scale,
    )


def _job(real: Real) -> Job:
    c = real.configuration
    waves_ready = -(-c.dispatch.ready_groups_max // c.trainer.groups_per_step)
    return Job(
        groups_per_step=c.trainer.groups_per_step,
        steps=c.trainer.steps,
        skip=real.skipped,
        max_lag=waves_ready if c.dispatch.max_lag is None else c.dispatch.max_lag,
        quota=c.rollouts.quota or 0,
        queue_per_slot=c.dispatch.queue_per_slot,
        micro_batch_tokens=c.trainer.micro_batch_tokens,
        ready_groups_max=c.dispatch.ready_groups_max,
    )


def _workload(real: Real) -> RecordedWorkload:
    c, work = real.configuration, real.work
    if c.rollouts.engine == "paced":
        drawn = lengths_from(c.paced.lengths)
        distribution, correlation = drawn.distribution, drawn.correlation
        prompts = int(str(c.task.options["prompts"]))
    else:
        distribution = LengthTrace(tuple(sorted(float(n) for g in work.lengths for n in g)))
        correlation, prompts = CORRELATION, PROMPTS
    return RecordedWorkload(
        AnswerLengths(distribution, correlation, c.sampling.tokens_max),
        c.trainer.samples_per_group,
        prompts,
        work.prompt_tokens,
        seed=0,
        groups=work.lengths,
    )
