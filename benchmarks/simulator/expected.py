"""The simulator's prediction of a real run, from its configuration and its work, on a machine that
is calibrated by another run.

A step of a real engine lasts longer while a trainer computes beside it than alone (as in
`rollstream profile`), since caches and memory are shared. The factor comes from the calibration
run: its seconds of decoding per token over those that its own profile predicts.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulator.observed import Overheads, Real
from rollstream.producers.engines.factory import lengths_from, roofline_from
from rollstream.producers.engines.paced.lengths import LengthTrace
from rollstream.producers.engines.roofline import Roofline
from rollstream.roles.rollout import measure_profile
from rollstream.simulator.experiment import Prediction, RealRunSettings, predict
from rollstream.simulator.replica import scaled_roofline

PROMPTS = 1 << 20  # of the quickstart: no prompt comes twice
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
    is_paced = real.configuration.rollouts.engine == "paced"
    found = predict((_paced if is_paced else _torch)(real, on))
    # In the simulator steps follow each other at once; time between two is idle, not decoding.
    return replace(found, idle_share=1 - (1 - found.idle_share) * on.overheads.decoding)


def _busy_s(run: Prediction) -> float:
    """Seconds of decoding per trained token."""
    return (1 - run.idle_share) / run.tokens_per_s


def _torch(real: Real, on: Machine) -> RealRunSettings:
    return replace(_settings(real, on), train_token_s=on.overheads.train_token_s)


def _paced(real: Real, on: Machine) -> RealRunSettings:
    c = real.configuration
    scale = c.paced.time_scale
    lengths = lengths_from(c.paced.lengths)
    return replace(
        _settings(real, on),
        lengths=lengths.distribution,
        kv_capacity=c.paced.kv_tokens or c.rollouts.slots * c.rollouts.context_max,
        train_step_s=c.paced.train_step_s / scale,
        train_token_s=c.paced.train_token_s / scale,
        correlation=lengths.correlation,
        prompts=int(str(c.task.options["prompts"])),
    )


def _settings(real: Real, on: Machine) -> RealRunSettings:
    c, work = real.configuration, real.work
    assert c.dispatch.max_lag is not None, "the simulator bounds a real run by its lag"
    return RealRunSettings(
        rollouts=c.rollouts.count,
        roofline=scaled_roofline(on.roofline, on.overheads.decoding),
        slots=c.rollouts.slots,
        kv_capacity=c.rollouts.slots * c.rollouts.context_max,
        lengths=LengthTrace(tuple(sorted(float(n) for group in work.lengths for n in group))),
        length_max=c.sampling.tokens_max,
        groups_per_step=c.trainer.groups_per_step,
        samples_per_group=c.trainer.samples_per_group,
        steps=c.trainer.steps,
        max_lag=c.dispatch.max_lag,
        on_update=c.rollouts.on_update,
        skip=real.skipped,
        update_s=on.overheads.update_s,
        publish_s=on.overheads.publish_s,
        prompt_tokens=work.prompt_tokens,
        prompts=PROMPTS,
        repack=c.dispatch.repack,
        queue_per_slot=c.dispatch.queue_per_slot,
        repack_every_s=c.dispatch.repack_every_s,
        recorded=work.lengths,
    )
