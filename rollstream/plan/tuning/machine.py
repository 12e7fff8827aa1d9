"""Joins a configuration, an engine's profile and a recorded run's measurements to the simulator's
input; measured values are preferred.
"""

from dataclasses import dataclass, replace

import numpy as np

from rollstream.errors import ConfigurationError
from rollstream.plan.tuning.choices import TuningChoice, choice_of, trainer_gpus, trains_on_cpu
from rollstream.plan.tuning.cores import on_shared_cores
from rollstream.plan.tuning.measured import DraftGain, RunMeasurements, fit_step_times
from rollstream.producers.engines.paced.build import lengths_from
from rollstream.producers.engines.paced.lengths import LengthTrace
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.run.config.settings import Configuration
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.experiment import Prediction, RunPolicy, predict
from rollstream.simulator.replica import scaled_roofline
from rollstream.simulator.workload import AnswerLengths, RecordedWorkload

POINTS_MIN = 32  # fewer measured answers give no step time
# Waits for KV memory only lengthen an answer.
WAITLESS_SHARE = 0.25
"""Of the ratios of measured and computed step times."""
STEPS_MEASURED = 8  # simulated steps after those in which the run fills
# Generation ahead of training takes cores from it until the lag bound stops it, after many steps.
LONGER = 2
"""Times as long where both sides share cores."""
NO_REPEATS = 1 << 20  # prompts of a data set of unknown size: none comes twice
CORES_SHARE_MIN = 0.25  # of the cores: more than the rest is not taken for other work
HIDDEN_REPACK_S = 5.0  # any period: the planner of repack is off


@dataclass(frozen=True, slots=True)
class TuningMachine:
    """`engine` are the step times without drafts, in wall seconds, `kv_capacity` is a rollout's
    (None: each slot has room for a longest sequence).
    """

    configuration: Configuration
    engine: Roofline
    kv_capacity: int | None
    train_token_s: float
    """Of one unit of the trainer."""
    train_serial_s: float
    """Per token, for any number of units."""
    train_fixed_s: float
    update_s: float
    publish_s: float
    arrive_s: float
    workload: RecordedWorkload
    drafts: DraftGain | None
    is_profiled: bool = True
    """Rollouts know their step times, and so the batch in which one more row is nearly free;
    otherwise that batch is all their slots.
    """
    cores: float | None = None
    """Shared CPU cores; None: each unit computes on its own."""
    checked: float | None = None
    """Predicted over recorded tokens per second of RUN's own settings."""
    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def predicted(self, choice: TuningChoice, skip: int) -> Prediction | None:
        """Returns means over `STEPS_MEASURED` steps after the first `skip`; None if a longest
        answer does not fit, or no step ever completes.
        """
        if self.cores is None:
            return self._simulated(choice, skip, STEPS_MEASURED, 1.0)
        skip, steps = LONGER * skip, LONGER * STEPS_MEASURED
        return on_shared_cores(
            lambda slower: self._simulated(choice, skip, steps, slower),
            choice.rollouts * self.configuration.rollouts.threads,
            choice.trainer_gpus,
            self.cores,
        )

    def _simulated(
        self, choice: TuningChoice, skip: int, steps: int, slower: float
    ) -> Prediction | None:
        c = self.configuration
        job = Job(
            groups_per_step=c.trainer.groups_per_step,
            steps=skip + steps,
            skip=skip,
            max_lag=choice.waves - 1,
            quota=c.rollouts.quota or 0,
            queue_per_slot=c.dispatch.queue_per_slot,
            micro_batch_tokens=c.trainer.micro_batch_tokens,
        )
        policy = RunPolicy(
            choice.on_update, choice.repack_every_s is not None, choice.max_lag is not None
        )
        try:
            cluster = slowed(self.cluster(choice), slower)
            return predict(cluster, job, self.workload, policy, ends=False)
        except ConfigurationError:
            return None

    def cluster(self, choice: TuningChoice) -> Cluster:
        roofline, slots = self.engine, choice.slots
        if choice.drafts and self.drafts is not None:
            roofline = with_drafts(roofline, self.drafts)
        bound = batch_max(roofline, slots) if self.is_profiled else slots
        return Cluster(
            rollouts=choice.rollouts,
            roofline=roofline,
            slots=slots,
            kv_capacity=self.kv_capacity or slots * self.configuration.rollouts.context_max,
            batch_max=self.configuration.rollouts.batch_max or bound,
            train_token_s=self.train_token_s / choice.trainer_gpus + self.train_serial_s,
            train_fixed_s=self.train_fixed_s,
            update_s=self.update_s,
            publish_s=self.publish_s,
            arrive_s=self.arrive_s,
            repack_every_s=choice.repack_every_s or HIDDEN_REPACK_S,
        )


def slowed(cluster: Cluster, slower: float) -> Cluster:
    return replace(
        cluster,
        roofline=scaled_roofline(cluster.roofline, 1 / slower),
        train_token_s=cluster.train_token_s * slower,
    )


def machine_of(
    c: Configuration,
    profile: Roofline | None,
    run: RunMeasurements | None,
    recorded: Configuration | None,
    cores: int | None = None,
) -> TuningMachine:
    """`profile` is the measured roofline of the engine of `c`, `run` the measurements of a run with
    the configuration `recorded`. `cores` are this machine's. Raises `ConfigurationError`, with an
    advice, if step times, training times or lengths are unknown.
    """
    assumed, unknown = list[str](), list[str]()
    workload = _workload(c, run, unknown)
    engine = _engine(c, profile, run, recorded, assumed)
    token_s, fixed_s = _training(c, run, recorded, assumed)
    drafts = run.drafts if run is not None and c.rollouts.can_draft else None
    kv_capacity = None if c.has_model else c.paced.kv_tokens
    if c.rollouts.kind.sizes_cache:
        kv_capacity = run.kv_capacity if run is not None else None
        if kv_capacity is None:
            unknown.append("the engine's KV capacity; slots × rollouts.context_max is assumed")
    measured = RunMeasurements() if run is None else run
    if None in (measured.update_s, measured.publish_s, measured.arrive_s):
        assumed.append("versions that are published, sent and loaded in no time (no log shows it)")
    is_shared = shares_cores(c) and (recorded is None or shares_cores(recorded))
    if is_shared and measured.decode_cpu_token_s and measured.train_cpu_token_s:
        engine = at_cpu_time(engine, measured, (recorded or c).rollouts.slots)
        token_s = measured.train_cpu_token_s
    else:
        cores = None
    unknown += _unknown(c, drafts, cores)
    machine = TuningMachine(
        configuration=c,
        engine=engine,
        kv_capacity=kv_capacity,
        train_token_s=token_s,
        train_serial_s=_paced_delay_s(run, recorded),
        train_fixed_s=fixed_s,
        update_s=measured.update_s or 0.0,
        publish_s=measured.publish_s or 0.0,
        arrive_s=measured.arrive_s or 0.0,
        workload=workload,
        drafts=drafts,
        is_profiled=profile is not None or not c.has_model,
        cores=cores,
        assumed=tuple(assumed),
        unknown=tuple(unknown),
    )
    return _checked(machine, measured, recorded)


def shares_cores(c: Configuration) -> bool:
    return c.rollouts.kind.is_on_cpu(c.rollouts) and trains_on_cpu(c)


def at_cpu_time(engine: Roofline, run: RunMeasurements, slots: int) -> Roofline:
    """Returns the step times at the level of the run's CPU time per token."""
    if not run.points or run.decode_cpu_token_s is None:
        return engine
    # Wall times on shared cores contain those of the others, and waits for one of the `slots`.
    rows = [min(slots, max(1, round(point.rows))) for point in run.points]
    each = [
        engine.step_s(count, point.kv_tokens * count / point.rows) / count
        for count, point in zip(rows, run.points, strict=True)
    ]
    return scaled_roofline(engine, float(np.mean(each)) / run.decode_cpu_token_s)


def _checked(
    machine: TuningMachine, run: RunMeasurements, recorded: Configuration | None
) -> TuningMachine:
    c = machine.configuration
    if recorded is None or run.steady_tokens_per_s is None or _step_of(recorded) != _step_of(c):
        return machine
    choice = choice_of(recorded)
    prediction = machine.predicted(choice, choice.waves + 1)
    if prediction is None or not run.steady_tokens_per_s:
        return machine
    off = prediction.tokens_per_s / run.steady_tokens_per_s
    if machine.cores is not None and off > 1:
        # The cores that the run did not reach go to other work than decoding and training.
        machine = replace(machine, cores=machine.cores * max(CORES_SHARE_MIN, 1 / off))
        prediction = machine.predicted(choice, choice.waves + 1) or prediction
        off = prediction.tokens_per_s / run.steady_tokens_per_s
    return replace(machine, checked=off)


def _step_of(c: Configuration) -> tuple[int, int]:
    return c.trainer.groups_per_step, c.trainer.samples_per_group


def _unknown(c: Configuration, drafts: DraftGain | None, cores: int | None) -> list[str]:
    unknowns = ["what lag costs in learning: no choice has more than the configuration permits"]
    unknowns += ["environments that wait, and shared prefixes"]
    if c.rollouts.can_draft and drafts is None:
        unknowns.append("what drafts give: no RUN with drafts shows it, so they stay as they are")
    if c.model.lora.rank:
        unknowns.append("that a rollout with adapters serves several versions and never drains")
    if cores is not None:
        unknowns.append(f"how the {cores} cores are divided: all threads are slowed by one factor")
    elif trains_on_cpu(c):
        unknowns.append(
            "how rollouts and trainer share the cores: each unit is simulated as a core"
        )
    elif c.has_model:
        unknowns.append("whether more slots fit a GPU's memory: `rollstream run` checks it")
    return unknowns


def _workload(
    c: Configuration, run: RunMeasurements | None, unknown: list[str]
) -> RecordedWorkload:
    samples, option = c.trainer.samples_per_group, c.task.options.get("prompts")
    prompts = run.prompts if run is not None else None
    if prompts is None:
        prompts = option if isinstance(option, int) else NO_REPEATS
        if prompts == NO_REPEATS:
            unknown.append("how many prompts a pass has: none is taken to come twice")
    if run is not None and run.lengths:
        distribution = LengthTrace(tuple(map(float, run.lengths)))
        correlation, groups = run.correlation, tuple(group[:samples] for group in run.groups)
        prompt_tokens = run.prompt_tokens
    elif not c.has_model:
        # Without RUN, the answers that the engine `paced` draws.
        drawn = lengths_from(c.paced.lengths)
        distribution, correlation, groups = drawn.distribution, drawn.correlation, ()
        size = c.task.options.get("prompt_tokens")
        prompt_tokens = size if isinstance(size, int) else 1
    else:
        raise ConfigurationError(
            "no answer lengths are known: " + ("RUN has no finished answer" if run else "no RUN")
            + "; give a recorded run of this task (a run's folder or its archive) behind CONFIG"
        )  # fmt: skip
    longest = max(1, min(c.sampling.tokens_max, c.rollouts.context_max - prompt_tokens))
    lengths = AnswerLengths(distribution, correlation, longest)
    return RecordedWorkload(lengths, samples, prompts, prompt_tokens, c.seed, groups)


def _engine(
    c: Configuration,
    profile: Roofline | None,
    run: RunMeasurements | None,
    recorded: Configuration | None,
    assumed: list[str],
) -> Roofline:
    points = () if run is None or len(run.points) < POINTS_MIN else run.points
    if recorded is not None and c.rollouts.engine != recorded.rollouts.engine:
        points = ()
        assumed.append(f"the step times of the profile: RUN has engine {recorded.rollouts.engine}")
    alone = _paced(c) or profile
    if alone is None and not points:
        raise ConfigurationError(
            "no step times of the engine are known: make a profile (`rollstream profile CONFIG`), "
            f"or give a recorded run behind CONFIG with at least {POINTS_MIN} finished answers of "
            f"several tokens{'' if run is None else f' (this one has {len(run.points)})'}"
        )
    gain = None if run is None else run.drafts
    if alone is None:
        fitted = fit_step_times(points)
        assumed.append("step times fitted to RUN's answers (no profile); other batches extrapolate")
        return fitted if gain is None else without_drafts(fitted, gain)
    if not points:
        assumed.append("step times without pauses and other load, as no RUN shows them")
        return alone
    # RUN's answers set the level: beside a trainer, with all that happens between two steps.
    timed = (recorded and _paced(recorded)) or alone
    if gain is not None:
        timed = with_drafts(timed, gain)
    ratios = [point.token_s / timed.step_s(round(point.rows), point.kv_tokens) for point in points]
    return scaled_roofline(alone, 1 / float(np.quantile(ratios, WAITLESS_SHARE)))


def _paced(c: Configuration) -> Roofline | None:
    roofline = c.rollouts.kind.roofline(c)
    # In wall seconds.
    return None if roofline is None else scaled_roofline(roofline, c.paced.time_scale)


def _training(
    c: Configuration,
    run: RunMeasurements | None,
    recorded: Configuration | None,
    assumed: list[str],
) -> tuple[float, float]:
    """The trainer's seconds per token on one unit, and of a step beside its tokens."""
    assumed.append("a trainer that is as much faster as it has more GPUs")
    units = trainer_gpus(c)
    if not c.has_model:
        token_s, step_s = _paced_training(c)
        return token_s * units, step_s
    if run is None or run.trained_token_s is None:
        raise ConfigurationError(
            "nothing shows how fast the trainer is: give a recorded run behind CONFIG; a short one "
            "is enough (`rollstream run CONFIG --set trainer.steps=8 --run runs/short`)"
        )
    return run.trained_token_s * (units if recorded is None else trainer_gpus(recorded)), 0.0


def _paced_training(c: Configuration) -> tuple[float, float]:
    return c.paced.train_token_s / c.paced.time_scale, c.paced.train_step_s / c.paced.time_scale


def _paced_delay_s(run: RunMeasurements | None, recorded: Configuration | None) -> float:
    if run is None or run.trained_token_s is None or run.step_tokens is None:
        return 0.0
    if recorded is None or recorded.has_model:
        return 0.0
    # A paced trainer's own work on samples, which more modelled accelerators would not speed up.
    token_s, step_s = _paced_training(recorded)
    return max(0.0, run.trained_token_s - token_s - step_s / run.step_tokens)


def with_drafts(roofline: Roofline, gain: DraftGain) -> Roofline:
    """Returns seconds per token of a row."""
    # A pass computes more rows and gives more tokens.
    faster = scaled_roofline(roofline, gain.tokens_per_pass)
    return replace(
        faster,
        row_s=faster.row_s * gain.rows_per_pass,
        prefill_token_s=roofline.prefill_token_s,
    )


def without_drafts(roofline: Roofline, gain: DraftGain) -> Roofline:
    return with_drafts(roofline, DraftGain(1 / gain.tokens_per_pass, 1 / gain.rows_per_pass))
