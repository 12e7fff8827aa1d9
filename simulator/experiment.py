"""Runs every policy on every cluster of the settings, each policy under its best split
of the GPUs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from producers.engines.paced.lengths import Distribution, LogNormal, Mixture
from simulator.cluster import Job, Values, cluster_of, values
from simulator.constants import MODELS, ROLLOUT_SHARES, Model
from simulator.policies import Policy, ablation, policy_of
from simulator.result import Result
from simulator.settings import ClusterSettings, LengthSettings, SimulationSettings
from simulator.simulation import simulate
from simulator.traces import read_lengths
from simulator.workload import Lengths, Workload
from streams.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Run:
    """A result, with the cluster and the share of generating GPUs that gave it."""

    cluster: ClusterSettings
    share: float
    result: Result


@dataclass(frozen=True, slots=True)
class Bench:
    """One model on a number of GPUs with one workload, on which policies run."""

    model: Model
    gpus: int
    constants: Values
    settings: SimulationSettings
    distribution: Distribution
    scale: int = 1

    def run(self, policy: Policy, share: float) -> Result:
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
        self, policy: Policy, shares: tuple[float, ...] = ROLLOUT_SHARES
    ) -> tuple[float, Result]:
        """The fastest share of `shares` and its result. Impossible shares are skipped; raises
        `ConfigurationError` if all are.
        """
        found: list[tuple[float, Result]] = []
        refused = ConfigurationError("rollout_share: none was given")
        for share in shares[:1] if policy.colocated else shares:
            try:
                found.append((share, self.run(policy, share)))
            except ConfigurationError as error:
                refused = error
        if not found:
            raise refused
        return max(found, key=lambda one: one[1].tokens_per_s)

    def samples(self) -> int:
        return int(self.constants["samples_per_group"])

    def workload(self) -> Workload:
        constants = self.constants
        lengths = Lengths(
            self.distribution, constants["length_between_prompts"], int(constants["length_max"])
        )
        prompt = int(constants["prompt_tokens"])
        return Workload(lengths, self.samples(), self.settings.prompts, prompt, self.settings.seed)


def bench_of(settings: SimulationSettings, cluster: ClusterSettings, constants: Values) -> Bench:
    """Raises `ConfigurationError` for an unknown model."""
    if cluster.model not in MODELS:
        known = ", ".join(MODELS)
        raise ConfigurationError(f"clusters: model {cluster.model!r} is unknown; known: {known}")
    model = MODELS[cluster.model]
    model = replace(model, tp=cluster.tp or model.tp)
    distribution = distribution_of(settings.lengths, constants)
    return Bench(model, cluster.gpus, constants, settings, distribution, settings.scale)


def distribution_of(settings: LengthSettings, constants: Values) -> Distribution:
    """The length distribution: recorded, a mixture, or the constants' log-normal."""
    if settings.trace is not None:
        return read_lengths(settings.trace, settings.column)
    if settings.parts:
        return Mixture(tuple((p.weight, LogNormal(p.median, p.p99)) for p in settings.parts))
    median = constants["length_median"]
    return LogNormal(median, median * constants["length_p99_over_median"])


def names_of(settings: SimulationSettings) -> list[str]:
    """The policies in their order, those of the ablation last. Raises `ConfigurationError` for
    unknown ones.
    """
    names = [*settings.policies, *(ablation(settings.ablation) if settings.ablation else ())]
    for name in names:
        policy_of(name)
    if not names:
        raise ConfigurationError("policies: name at least one, e.g. policies = ['laminar']")
    return list(dict.fromkeys(names))


def runs(settings: SimulationSettings) -> Iterator[Run]:
    """Yield the result of every policy on every cluster as it finishes."""
    constants = checked(values(**settings.constants))
    names = names_of(settings)
    for cluster in settings.clusters:
        bench = bench_of(settings, cluster, constants)
        shares = ROLLOUT_SHARES if cluster.rollout_share is None else (cluster.rollout_share,)
        for name in names:
            share, result = bench.best(policy_of(name), shares)
            yield Run(cluster, share, result)


def checked(constants: Mapping[str, float]) -> Values:
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
