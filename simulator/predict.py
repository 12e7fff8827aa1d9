"""Predicts the speed of a real run on one machine: N paced rollouts beside a trainer with a fixed
step time.

`benchmarks/simulator/` compares such predictions with runs; nothing here is fitted to a run.
"""

from dataclasses import dataclass, fields, replace

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.lengths import LengthDistribution
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.policies import IN_FLIGHT, OURS, PARTIAL
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, RecordedWorkload, Workload

ROUND_S = 0.1  # the service's dispatch interval
POLICIES = {"keep_version": OURS, "in_flight": IN_FLIGHT, "in_flight_recompute": PARTIAL}


@dataclass(frozen=True, slots=True)
class RealRunSettings:
    """A run's configuration as far as it determines the speed. Seconds are as paced by
    the engine.
    """

    rollouts: int
    roofline: Roofline
    slots: int
    kv_capacity: int
    """Tokens of one rollout."""
    lengths: LengthDistribution
    length_max: int
    groups_per_step: int
    samples_per_group: int
    steps: int
    max_lag: int
    on_update: str = "keep_version"
    skip: int = 0
    train_step_s: float = 0.0
    train_token_s: float = 0.0
    update_s: float = 0.0
    """From the decision to pull until the rollout generates again."""
    publish_s: float = 0.0
    """From a step's end until rollouts can pull its version."""
    correlation: float = 0.7
    prompt_tokens: int = 32
    prompts: int = 192
    repack: bool = True
    quota: int = 0
    """Trajectories under one version; 0: 2 × slots, the service's default."""
    queue_per_slot: float = 0.25
    repack_every_s: float = 5.0
    move_s: float = 0.1
    seed: int = 0
    recorded: tuple[tuple[int, ...], ...] = ()
    """By group, lengths of a finished run's own answers; empty: all lengths are drawn."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of the whole run, from its first assignment to the end of its last step."""

    tokens_per_s: float
    kv_utilisation: float
    idle_share: float


def predict(settings: RealRunSettings) -> Prediction:
    """Simulate the run. Raises `ConfigurationError` for an unknown `on_update` and for answers that
    do not fit the cache.
    """
    if settings.on_update not in POLICIES:
        raise ConfigurationError(
            f"on_update must be one of {', '.join(POLICIES)}, got {settings.on_update!r}"
        )
    if settings.kv_capacity < settings.prompt_tokens + settings.length_max:
        raise ConfigurationError(
            f"kv_capacity must hold one answer: {settings.prompt_tokens} + {settings.length_max} "
            f"tokens, got {settings.kv_capacity}"
        )
    policy = replace(POLICIES[settings.on_update], relay=True, strict=True, early_start=True)
    if policy.on_update == "keep_version":
        policy = replace(policy, repack=settings.repack, migrate=settings.repack)
    result = simulate(_cluster(settings), _job(settings), policy, _workload(settings))
    return Prediction(result.tokens_per_s, result.kv_utilisation, result.idle_share)


def _cluster(settings: RealRunSettings) -> Cluster:
    return Cluster(
        rollouts=settings.rollouts,
        roofline=settings.roofline,
        slots=settings.slots,
        kv_capacity=settings.kv_capacity,
        batch_max=batch_max(settings.roofline, settings.slots),
        train_token_s=settings.train_token_s,
        train_fixed_s=settings.train_step_s,
        update_s=settings.update_s,
        arrive_s=settings.publish_s,
        kv_reserve=0.0,
        move_s=settings.move_s,
        repack_every_s=settings.repack_every_s,
    )


def _job(settings: RealRunSettings) -> Job:
    return Job(
        groups_per_step=settings.groups_per_step,
        steps=settings.steps,
        skip=settings.skip,
        max_lag=settings.max_lag,
        quota=settings.quota,
        queue_per_slot=settings.queue_per_slot,
        dispatch_every_s=ROUND_S,
        ends=True,
    )


def _workload(settings: RealRunSettings) -> Workload:
    lengths = AnswerLengths(settings.lengths, settings.correlation, settings.length_max)
    drawn = Workload(
        lengths,
        settings.samples_per_group,
        settings.prompts,
        settings.prompt_tokens,
        settings.seed,
    )
    if not settings.recorded:
        return drawn
    own = [getattr(drawn, one.name) for one in fields(drawn)]
    return RecordedWorkload(*own, groups=settings.recorded)
