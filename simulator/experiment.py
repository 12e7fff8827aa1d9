"""Defines the settings of `rollstream simulate` and runs the simulations that they describe.

A policy is one way to schedule generation and training: that of a published system, or this
project's (`policies.py`). `run_policies` simulates every policy on every cluster, each under the
split of the GPUs between rollouts and trainer that makes it fastest. `predict` predicts the speed
of a real run of this project on one machine; `benchmarks/simulator/` compares such predictions with
runs. No constant of the simulator is fitted to a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import Field

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.lengths import (
    LengthDistribution,
    LogNormal,
    LogNormalMixture,
)
from rollstream.simulator.cluster import Cluster, ConstantValues, Job, cluster_of, constant_values
from rollstream.simulator.constants import MODELS, ROLLOUT_SHARES, Model
from rollstream.simulator.policies import (
    IN_FLIGHT,
    OURS,
    PARTIAL,
    SchedulingPolicy,
    ablation,
    policy_of,
)
from rollstream.simulator.results import SimulationResult
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, Workload, read_lengths
from rollstream.storage.settings import Settings


class ClusterSettings(Settings):
    """One model on a number of GPUs."""

    model: str = "qwen2.5-7b"
    """Name of the model, one of MODELS in simulator/constants.py."""
    gpus: int = Field(default=64, ge=1, le=65_536)
    """GPUs of rollouts and trainer together."""
    rollout_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the GPUs that generate, for policies whose trainer has GPUs of its own; default: of
    1/4, 1/2 and 3/4, the share under which the policy is fastest.
    """
    tp: int | None = Field(default=None, ge=1, le=64)
    """GPUs of one rollout (tensor parallel); default: the number that MODELS has for the model."""


class LengthPart(Settings):
    """One log-normal part of a mixture of answer lengths."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """The part's share of the answers, relative to the weights of the other parts."""
    median: float = Field(ge=1, le=1e9)
    """Median of the part's answer lengths, in tokens."""
    p99: float = Field(ge=1, le=1e9)
    """99th percentile of the part's answer lengths, in tokens."""


class AnswerLengthSettings(Settings):
    """Lengths of the answers; default: a log-normal distribution whose median and 99th percentile
    are constants of simulator/constants.py.
    """

    parts: tuple[LengthPart, ...] = Field(default=(), max_length=16)
    """A mixture of log-normal parts, in place of the default."""
    trace: str | None = None
    """Recorded lengths, in place of a distribution: a text file with one length per line, a Parquet
    file, or the folder of an archive.
    """
    column: str = "logprobs"
    """Column of the Parquet files that gives the length: a number, or a list, whose number of items
    is the length.
    """


class FaultSettings(Settings):
    """Failures, preemptions and unequal speeds of rollouts. A failed or preempted rollout returns
    after a repair.
    """

    failures_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Failures of each rollout. They come without notice and lose the tokens since the last
    partial.
    """
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Preemptions of each rollout. They come with notice, so that the rollout publishes its
    partials and no token is lost.
    """
    speeds: tuple[float, ...] = Field(default=(1.0,), min_length=1, max_length=1024)
    """Relative speeds of the rollouts; if the list is shorter than their number, it repeats. 1 is
    the speed that follows from the constants.
    """


class SimulationSettings(Settings):
    """The clusters, the scheduling policies, and the workload that each policy runs there."""

    seed: int = Field(default=0, ge=0)
    """Seed of lengths and failures."""
    policies: tuple[str, ...] = (
        "synchronous", "one_step", "stream", "partial_rollout", "in_flight", "laminar", "rhymerl",
        "ours",
    )  # fmt: skip
    """Policies by name; their speeds are stated relative to the first one's. A name with `-` leaves
    out a mechanism: `ours-repack` is `ours` without repack.
    """
    ablation: str | None = None
    """A policy that is also simulated without each single one of its mechanisms."""
    clusters: tuple[ClusterSettings, ...] = Field(default=(ClusterSettings(),), min_length=1)
    """The clusters, simulated one after another."""
    scale: int = Field(default=1, ge=1, le=1024)
    """GPUs and groups are divided by this number: the load per GPU stays the same, and the
    simulation takes that much less time.
    """
    prompts: int = Field(default=17_000, ge=1)
    """Number of prompts in the data set, which is repeated pass after pass."""
    queue_per_slot: float = Field(default=1.0, ge=0)
    """Assignments that may wait at a rollout per slot, like `dispatch.queue_per_slot`; a slot is a
    place for one running sequence.
    """
    dispatch_every_s: float = Field(default=0.25, ge=0)
    """Seconds between an event and the next round of dispatch, which plans for it."""
    lengths: AnswerLengthSettings = AnswerLengthSettings()
    """Lengths of the answers."""
    faults: FaultSettings = FaultSettings()
    """Failures, preemptions and unequal speeds of rollouts."""
    constants: dict[str, float] = Field(default_factory=dict)
    """Values that replace constants of simulator/constants.py, by name."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Holds the result of one policy on one cluster, and `share`, the share of the GPUs that
    generated: 1 under a `colocated` policy.
    """

    cluster: ClusterSettings
    share: float
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """Simulates policies with one model on a number of GPUs, under the workload of `settings`."""

    model: Model
    gpus: int
    constants: ConstantValues
    settings: SimulationSettings
    distribution: LengthDistribution
    scale: int = 1

    def run(self, policy: SchedulingPolicy, share: float) -> SimulationResult:
        """Simulate one policy where `share` of the GPUs generate. Raises `ConfigurationError` if
        the model and its longest answer do not fit.
        """
        settings, constants = self.settings, self.constants
        cluster = cluster_of(self.model, max(1, self.gpus // self.scale), share, policy, constants)
        cluster = replace(
            cluster,
            speeds=settings.faults.speeds,
            failures_per_hour=settings.faults.failures_per_hour,
            preemptions_per_hour=settings.faults.preemptions_per_hour,
        )
        groups, samples = max(1, int(constants["groups_per_step"]) // self.scale), self.samples()
        fair = constants["quota_waves"] * groups * samples / cluster.rollouts
        job = Job(
            groups_per_step=groups,
            steps=int(constants["steps"]),
            skip=int(constants["steps_skipped"]),
            max_lag=int(constants["waves_outstanding"]) - 1,
            quota=max(1, round(fair)),
            queue_per_slot=settings.queue_per_slot,
            dispatch_every_s=settings.dispatch_every_s,
        )
        return simulate(cluster, job, policy, self.workload())

    def best(
        self, policy: SchedulingPolicy, shares: tuple[float, ...] = ROLLOUT_SHARES
    ) -> tuple[float, SimulationResult]:
        """Returns the share of `shares` under which the policy is fastest, and its result. Shares
        that are impossible are skipped; raises `ConfigurationError` if all are. A policy that
        trains and generates on the same GPUs (`colocated`) runs once, with a share of 1.
        """
        found: list[tuple[float, SimulationResult]] = []
        refused = ConfigurationError("rollout_share: none was given")
        for share in (1.0,) if policy.colocated else shares:
            try:
                found.append((share, self.run(policy, share)))
            except ConfigurationError as error:
                refused = error
        if not found:
            raise refused
        return max(found, key=lambda entry: entry[1].tokens_per_s)

    def samples(self) -> int:
        return int(self.constants["samples_per_group"])

    def workload(self) -> Workload:
        constants = self.constants
        lengths = AnswerLengths(
            self.distribution, constants["length_between_prompts"], int(constants["length_max"])
        )
        prompt = int(constants["prompt_tokens"])
        return Workload(lengths, self.samples(), self.settings.prompts, prompt, self.settings.seed)


def setup_of(
    settings: SimulationSettings, cluster: ClusterSettings, constants: ConstantValues
) -> SimulationSetup:
    """Returns the setup of one cluster. Raises `ConfigurationError` for an unknown model."""
    if cluster.model not in MODELS:
        known = ", ".join(MODELS)
        raise ConfigurationError(f"clusters: model {cluster.model!r} is unknown; known: {known}")
    model = MODELS[cluster.model]
    model = replace(model, tp=cluster.tp or model.tp)
    distribution = distribution_of(settings.lengths, constants)
    return SimulationSetup(model, cluster.gpus, constants, settings, distribution, settings.scale)


def distribution_of(
    settings: AnswerLengthSettings, constants: ConstantValues
) -> LengthDistribution:
    """Returns the distribution of answer lengths that the settings name, or the default."""
    if settings.trace is not None:
        return read_lengths(settings.trace, settings.column)
    if settings.parts:
        return LogNormalMixture(
            tuple((p.weight, LogNormal(p.median, p.p99)) for p in settings.parts)
        )
    median = constants["length_median"]
    return LogNormal(median, median * constants["length_p99_over_median"])


def policy_names(settings: SimulationSettings) -> list[str]:
    """Returns the names of all policies to simulate, those of the ablation last. Raises
    `ConfigurationError` if one is unknown or there is none.
    """
    names = [*settings.policies, *(ablation(settings.ablation) if settings.ablation else ())]
    for name in names:
        policy_of(name)
    if not names:
        raise ConfigurationError("policies: name at least one, e.g. policies = ['laminar']")
    return list(dict.fromkeys(names))


def run_policies(settings: SimulationSettings) -> Iterator[PolicyRun]:
    """Yield the result of every policy on every cluster, each as soon as it is simulated."""
    constants = checked_constants(constant_values(**settings.constants))
    names = policy_names(settings)
    for cluster in settings.clusters:
        bench = setup_of(settings, cluster, constants)
        shares = ROLLOUT_SHARES if cluster.rollout_share is None else (cluster.rollout_share,)
        for name in names:
            share, result = bench.best(policy_of(name), shares)
            yield PolicyRun(cluster, share, result)


def checked_constants(constants: Mapping[str, float]) -> ConstantValues:
    """Return the constants unchanged. Raises `ConfigurationError` if nothing can be simulated with
    them.
    """
    for name in ("groups_per_step", "samples_per_group", "steps", "slots", "length_max",
                 "prompt_tokens", "waves_outstanding", "length_median"):  # fmt: skip
        if constants[name] < 1:
            raise ConfigurationError(f"constants.{name} must be ≥ 1, got {constants[name]:g}")
    for name, value in constants.items():
        if not 0 <= value < 1e18:
            raise ConfigurationError(f"constants.{name} must be from 0 to 1e18, got {value:g}")
    for name in ("gpu_flops", "gpu_bandwidth", "bandwidth_share", "decode_flops_share",
                 "prefill_flops_share", "train_mfu", "global_sync_bandwidth", "switch_bandwidth",
                 "relay_stall_bandwidth", "relay_chain_bandwidth", "pull_bandwidth",
                 "repack_every_s", "length_p99_over_median"):  # fmt: skip
        if constants[name] <= 0:
            raise ConfigurationError(f"constants.{name} must be > 0, got {constants[name]:g}")
    if constants["steps_skipped"] >= constants["steps"]:
        raise ConfigurationError(
            f"constants.steps_skipped must be below steps ({constants['steps']:g}), "
            f"got {constants['steps_skipped']:g}"
        )
    if constants["length_between_prompts"] > 1 or constants["kv_reserve"] >= 1:
        raise ConfigurationError("constants: length_between_prompts ≤ 1 and kv_reserve < 1")
    return constants


ROUND_S, MOVE_S = 0.05, 0.1  # of the real dispatch: seconds between two rounds, and of a move
PREDICTED = {"keep_version": OURS, "in_flight": IN_FLIGHT, "in_flight_recompute": PARTIAL}
"""Value of `rollouts.on_update` → the policy that treats running sequences so."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds predicted means, from the end of step `Job.skip` (0: from the first assignment) to the
    end of the last step: trained tokens per second, the used share of the KV caches, the share of
    their time for which rollouts are idle and that of the trainer, and the mean and largest lag of
    the trained tokens.
    """

    tokens_per_s: float
    kv_utilisation: float
    idle_share: float
    trainer_idle_share: float = 0.0
    lag_mean: float = 0.0
    lag_max: int = 0


def predict(
    cluster: Cluster,
    job: Job,
    workload: Workload,
    on_update: str,
    repack: bool = True,
    *,
    bounded: bool = True,
    ends: bool = True,
) -> Prediction:
    """Predict the speed of a real run of this project by simulating all its steps. `on_update` and
    `repack` are settings of the run; trajectories are repacked and moved only under `keep_version`.

    With `bounded` `Job.max_lag` is the run's setting. Without it the run has `max_lag = null`: the
    admitted and untrained groups are at most (`Job.max_lag` + 1) · `groups_per_step`, at any lag.
    With `ends` the run admits only the groups of its steps, without it the load stays constant.

    The times in `cluster` are measured in the real run's seconds: `arrive_s` from a step's end
    until rollouts can pull its version (load it), `update_s` from the decision to pull until the
    rollout generates again. Raises `ConfigurationError` if `on_update` is unknown or a longest
    answer does not fit the KV cache of a rollout.
    """
    if on_update not in PREDICTED:
        raise ConfigurationError(
            f"on_update must be one of {', '.join(PREDICTED)}, got {on_update!r}"
        )
    prompt, longest = workload.prompt_tokens, workload.lengths.longest
    if cluster.kv_capacity < prompt + longest:
        raise ConfigurationError(
            f"kv_capacity must hold one answer: {prompt} + {longest} tokens, "
            f"got {cluster.kv_capacity}"
        )
    policy = replace(
        PREDICTED[on_update], relay=True, strict=bounded, bounded=bounded, early_start=True
    )
    if policy.on_update == "keep_version":
        policy = replace(policy, repack=repack, migrate=repack)
    machine = replace(cluster, kv_reserve=0.0, move_s=MOVE_S)
    run = replace(job, dispatch_every_s=ROUND_S, ends=ends)
    result = simulate(machine, run, policy, workload)
    return Prediction(
        result.tokens_per_s,
        result.kv_utilisation,
        result.idle_share,
        result.trainer_idle_share,
        result.lag_mean(),
        result.lag_max(),
    )
