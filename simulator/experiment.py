"""Simulates every policy on every cluster, each under its fastest split of the GPUs
(`run_policies`), or the speed of a real run (`predict`). No constant is fitted to a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
from rollstream.simulator.settings import (
    AnswerLengthSettings,
    ClusterSettings,
    EnvironmentSettings,
    SimulationSettings,
)
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, EnvironmentWaits, Workload, read_lengths


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The result, with the share of the GPUs that generated (`colocated`: 1)."""

    cluster: ClusterSettings
    share: float
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    model: Model
    gpus: int
    constants: ConstantValues
    settings: SimulationSettings
    distribution: LengthDistribution
    scale: int = 1

    def run(self, policy: SchedulingPolicy, share: float) -> SimulationResult:
        """`share` of the GPUs generate. Raises `ConfigurationError` if the model and its longest
        answer do not fit.
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
        waves_ready = constants["waves_outstanding"] - 1  # besides the one in training
        job = Job(
            groups_per_step=groups,
            steps=int(constants["steps"]),
            skip=int(constants["steps_skipped"]),
            max_lag=int(constants["waves_outstanding"]) - 1,
            quota=max(1, round(fair)),
            queue_per_slot=settings.queue_per_slot,
            dispatch_every_s=settings.dispatch_every_s,
            ready_groups_max=max(1, round(waves_ready * groups)),
        )
        return simulate(cluster, job, policy, self.workload())

    def best(
        self, policy: SchedulingPolicy, shares: tuple[float, ...] = ROLLOUT_SHARES
    ) -> tuple[float, SimulationResult]:
        """The fastest share (1 if `colocated`), and its result. Impossible ones are skipped; raises
        `ConfigurationError` if all are.
        """
        runs: list[tuple[float, SimulationResult]] = []
        refused = ConfigurationError("rollout_share: none was given")
        for share in (1.0,) if policy.colocated else shares:
            try:
                runs.append((share, self.run(policy, share)))
            except ConfigurationError as error:
                refused = error
        if not runs:
            raise refused
        return max(runs, key=lambda entry: entry[1].tokens_per_s)

    def samples(self) -> int:
        return int(self.constants["samples_per_group"])

    def workload(self) -> Workload:
        constants = self.constants
        lengths = AnswerLengths(
            self.distribution, constants["length_between_prompts"], int(constants["length_max"])
        )
        prompt = int(constants["prompt_tokens"])
        return Workload(
            lengths, self.samples(), self.settings.prompts, prompt, self.settings.seed,
            environment=environment_of(self.settings.environment),
        )  # fmt: skip


def setup_of(
    settings: SimulationSettings, cluster: ClusterSettings, constants: ConstantValues
) -> SimulationSetup:
    """Raises `ConfigurationError` for an unknown model."""
    if cluster.model not in MODELS:
        names = ", ".join(MODELS)
        raise ConfigurationError(f"clusters: model {cluster.model!r} is unknown; known: {names}")
    model = MODELS[cluster.model]
    model = replace(model, tp=cluster.tp or model.tp)
    distribution = distribution_of(settings.lengths, constants)
    return SimulationSetup(model, cluster.gpus, constants, settings, distribution, settings.scale)


def distribution_of(
    settings: AnswerLengthSettings, constants: ConstantValues
) -> LengthDistribution:
    if settings.trace is not None:
        return read_lengths(settings.trace, settings.column)
    if settings.parts:
        return LogNormalMixture(
            tuple((p.weight, LogNormal(p.median, p.p99)) for p in settings.parts)
        )
    median = constants["length_median"]
    return LogNormal(median, median * constants["length_p99_over_median"])


def environment_of(settings: EnvironmentSettings) -> EnvironmentWaits | None:
    """Returns None if answers have one turn. Raises `ConfigurationError` for a 99th percentile
    below the median.
    """
    if settings.turns_mean <= 1:
        return None
    if settings.wait_p99_s < settings.wait_median_s:
        raise ConfigurationError(
            f"environment.wait_p99_s must be ≥ wait_median_s ({settings.wait_median_s:g}), "
            f"got {settings.wait_p99_s:g}"
        )
    seconds = LogNormal(settings.wait_median_s, settings.wait_p99_s)
    return EnvironmentWaits(settings.turns_mean, seconds, settings.holds_kv)


def policy_names(settings: SimulationSettings) -> list[str]:
    """Returns the names, those of the ablation last. Raises `ConfigurationError` if one is unknown
    or there is none.
    """
    names = [*settings.policies, *(ablation(settings.ablation) if settings.ablation else ())]
    for name in names:
        policy_of(name)
    if not names:
        raise ConfigurationError("policies: name at least one, e.g. policies = ['laminar']")
    return list(dict.fromkeys(names))


def run_policies(settings: SimulationSettings) -> Iterator[PolicyRun]:
    """Yields each result as soon as it is simulated."""
    constants = checked_constants(constant_values(**settings.constants))
    names = policy_names(settings)
    for cluster in settings.clusters:
        bench = setup_of(settings, cluster, constants)
        shares = ROLLOUT_SHARES if cluster.rollout_share is None else (cluster.rollout_share,)
        for name in names:
            share, result = bench.best(policy_of(name), shares)
            yield PolicyRun(cluster, share, result)


def checked_constants(constants: Mapping[str, float]) -> ConstantValues:
    """Returns them unchanged. Raises `ConfigurationError` if they cannot be simulated."""
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
"""By `rollouts.on_update`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means from the end of step `Job.skip` (0: from the first assignment) to the end of the last
    step; the lag is that of the trained tokens.
    """

    tokens_per_s: float
    kv_utilisation: float
    idle_share: float
    trainer_idle_share: float = 0.0
    lag_mean: float = 0.0
    lag_max: int = 0


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """`on_update` and `repack` are a real run's settings, and `Job.max_lag` if `bounded`, else
    `Job.ready_groups_max`. `drafts`: tokens are drafted as `Cluster.drafts` states; `adapters`:
    versions are low-rank adapters; `prefix`: a rollout caches the prompt of a group once.
    """

    on_update: str
    repack: bool = True
    bounded: bool = True
    drafts: bool = False
    adapters: bool = False
    prefix: bool = False

    def scheduling(self) -> SchedulingPolicy:
        """Raises `ConfigurationError` for an unknown `on_update`."""
        if self.on_update not in PREDICTED:
            raise ConfigurationError(
                f"on_update must be one of {', '.join(PREDICTED)}, got {self.on_update!r}"
            )
        policy = replace(
            PREDICTED[self.on_update],
            relay=True,
            strict=self.bounded,
            bounded=self.bounded,
            early_start=True,
            prefix=self.prefix,
            drafts=self.drafts,
        )
        if policy.on_update != "keep_version":
            return policy
        # Trajectories are repacked and moved only under `keep_version` without adapters.
        moves = self.repack and not self.adapters
        return replace(policy, repack=moves, migrate=moves, adapters=self.adapters)


def predict(
    cluster: Cluster, job: Job, workload: Workload, run: RunPolicy, *, ends: bool = True
) -> Prediction:
    """Simulates all steps of a real run. With `ends` it admits only the groups of its steps, else
    the load stays constant.

    Times in `cluster` are measured in the real run's seconds: `arrive_s` from a step's end until
    rollouts can load its version, `update_s` from the decision to load it until the rollout
    generates again. Raises `ConfigurationError` if `run.on_update` is unknown or a longest answer
    does not fit the KV cache.
    """
    policy = run.scheduling()
    prompt, longest = workload.prompt_tokens, workload.lengths.longest
    if cluster.kv_capacity < prompt + longest:
        raise ConfigurationError(
            f"kv_capacity must hold one answer: {prompt} + {longest} tokens, "
            f"got {cluster.kv_capacity}"
        )
    machine = replace(cluster, kv_reserve=0.0, move_s=MOVE_S)
    steps = replace(job, dispatch_every_s=ROUND_S, ends=ends)
    result = simulate(machine, steps, policy, workload)
    return Prediction(
        result.tokens_per_s,
        result.kv_utilisation,
        result.idle_share,
        result.trainer_idle_share,
        result.lag_mean(),
        result.lag_max(),
    )
