"""Runs what the settings of `rollstream simulate` describe: every policy on every cluster, each
policy under its best split of the GPUs (`run_policies`).

`predict` gives the speed of a real run on one machine: N paced rollouts beside a trainer with a
fixed step time. `benchmarks/simulator/` compares such predictions with runs; nothing here is fitted
to a run.
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
    """A name of MODELS in simulator/constants.py."""
    gpus: int = Field(default=64, ge=1, le=65_536)
    """GPUs of rollouts and trainer together."""
    rollout_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the GPUs that generate, for policies with separate GPUs; default: each policy's
    fastest of three.
    """
    tp: int | None = Field(default=None, ge=1, le=64)
    """GPUs of one replica; default: the model's."""


class LengthPart(Settings):
    """One log-normal part of a mixture."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the answers, relative to the others."""
    median: float = Field(ge=1, le=1e9)
    """Median of its answers' lengths, in tokens."""
    p99: float = Field(ge=1, le=1e9)
    """99th percentile of its answers' lengths, in tokens."""


class AnswerLengthSettings(Settings):
    """Answer lengths; default: the constants' log-normal."""

    parts: tuple[LengthPart, ...] = Field(default=(), max_length=16)
    """A mixture in place of the log-normal."""
    trace: str | None = None
    """Recorded lengths in place of a distribution: a text file with one per line, a Parquet file,
    or the folder of an archive.
    """
    column: str = "logprobs"
    """Column of the Parquet files: a number, or a list whose length counts."""


class FaultSettings(Settings):
    """Rollouts that die and return."""

    failures_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Failures of each rollout, without notice."""
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Preemptions of each rollout, with time to publish its partials."""
    speeds: tuple[float, ...] = Field(default=(1.0,), min_length=1, max_length=1024)
    """Relative speeds of the rollouts; the list repeats. 1 is the speed of the constants."""


class SimulationSettings(Settings):
    """The clusters, the policies, and the workload."""

    seed: int = Field(default=0, ge=0)
    """Seed of lengths and failures."""
    policies: tuple[str, ...] = (
        "synchronous", "one_step", "stream", "partial_rollout", "in_flight", "laminar", "rhymerl",
        "ours",
    )  # fmt: skip
    """Policies; speed-ups count from the first. `ours-repack` leaves a mechanism out."""
    ablation: str | None = None
    """A policy that also runs without each of its mechanisms."""
    clusters: tuple[ClusterSettings, ...] = Field(default=(ClusterSettings(),), min_length=1)
    """Simulated one after another."""
    scale: int = Field(default=1, ge=1, le=1024)
    """Divide GPUs and groups by this number: the same load per GPU, simulated that much faster."""
    prompts: int = Field(default=17_000, ge=1)
    """Prompts of the data set, repeated pass after pass."""
    queue_per_slot: float = Field(default=1.0, ge=0)
    """Waiting assignments per slot, like `dispatch.queue_per_slot`."""
    dispatch_every_s: float = Field(default=0.25, ge=0)
    """Seconds between an event and the next dispatch round."""
    lengths: AnswerLengthSettings = AnswerLengthSettings()
    """Lengths of the answers."""
    faults: FaultSettings = FaultSettings()
    """Failures, preemptions and unequal speeds."""
    constants: dict[str, float] = Field(default_factory=dict)
    """Other values for constants of simulator/constants.py, by name."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Holds a result, with the cluster and the share of generating GPUs that gave it."""

    cluster: ClusterSettings
    share: float
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """Simulates policies on one model, a number of GPUs and one workload."""

    model: Model
    gpus: int
    constants: ConstantValues
    settings: SimulationSettings
    distribution: LengthDistribution
    scale: int = 1

    def run(self, policy: SchedulingPolicy, share: float) -> SimulationResult:
        """Simulate one policy under one split of the GPUs."""
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
        """Returns the fastest share of `shares` and its result. Impossible shares are skipped;
        raises `ConfigurationError` if all are.
        """
        found: list[tuple[float, SimulationResult]] = []
        refused = ConfigurationError("rollout_share: none was given")
        for share in shares[:1] if policy.colocated else shares:
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
    """Returns the length distribution: recorded, a mixture, or the constants' log-normal."""
    if settings.trace is not None:
        return read_lengths(settings.trace, settings.column)
    if settings.parts:
        return LogNormalMixture(
            tuple((p.weight, LogNormal(p.median, p.p99)) for p in settings.parts)
        )
    median = constants["length_median"]
    return LogNormal(median, median * constants["length_p99_over_median"])


def policy_names(settings: SimulationSettings) -> list[str]:
    """Returns the policies in their order, those of the ablation last. Raises `ConfigurationError`
    for unknown ones.
    """
    names = [*settings.policies, *(ablation(settings.ablation) if settings.ablation else ())]
    for name in names:
        policy_of(name)
    if not names:
        raise ConfigurationError("policies: name at least one, e.g. policies = ['laminar']")
    return list(dict.fromkeys(names))


def run_policies(settings: SimulationSettings) -> Iterator[PolicyRun]:
    """Yield the result of every policy on every cluster as it finishes."""
    constants = checked_constants(constant_values(**settings.constants))
    names = policy_names(settings)
    for cluster in settings.clusters:
        bench = setup_of(settings, cluster, constants)
        shares = ROLLOUT_SHARES if cluster.rollout_share is None else (cluster.rollout_share,)
        for name in names:
            share, result = bench.best(policy_of(name), shares)
            yield PolicyRun(cluster, share, result)


def checked_constants(constants: Mapping[str, float]) -> ConstantValues:
    """Return the constants. Raises `ConfigurationError` if no run is possible with them."""
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


ROUND_S, MOVE_S = 0.05, 0.1  # the service's dispatch interval, and the duration of its moves
PREDICTED = {"keep_version": OURS, "in_flight": IN_FLIGHT, "in_flight_recompute": PARTIAL}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds figures of the whole run, from its first assignment to the end of its last step."""

    tokens_per_s: float
    kv_utilisation: float
    idle_share: float


def predict(
    cluster: Cluster, job: Job, workload: Workload, on_update: str, repack: bool = True
) -> Prediction:
    """Predict the speed of a real run by simulating all of it. Seconds are as paced by the engine;
    `cluster.arrive_s` is from a step's end until rollouts can pull its version, `update_s` from the
    decision to pull until the rollout generates again.

    Raises `ConfigurationError` for an unknown `on_update` and for answers that do not fit the
    cache.
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
    policy = replace(PREDICTED[on_update], relay=True, strict=True, early_start=True)
    if policy.on_update == "keep_version":
        policy = replace(policy, repack=repack, migrate=repack)
    machine = replace(cluster, kv_reserve=0.0, move_s=MOVE_S)
    run = replace(job, dispatch_every_s=ROUND_S, ends=True)
    result = simulate(machine, run, policy, workload)
    return Prediction(result.tokens_per_s, result.kv_utilisation, result.idle_share)
