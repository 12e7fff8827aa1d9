"""Describes the machines of a simulation as one value (`Cluster`), which `cluster_of` computes from
constants, a model and a number of GPUs; and defines the dispatcher's state of one rollout and of
one open group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.simulator.constants import CONSTANTS, Model
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.replica import Replica
from rollstream.simulator.workload import SimulatedTrajectory

ConstantValues = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Holds the costs of generation, training and transfers, in seconds and tokens, and the number
    of rollouts.
    """

    rollouts: int
    roofline: Roofline
    slots: int
    kv_capacity: int
    """Capacity of one rollout's KV cache, in tokens."""
    batch_max: int
    train_token_s: float
    train_fixed_s: float
    update_s: float
    """Seconds for which a rollout stands still to take new weights."""
    publish_s: float = 0.0
    """Seconds for which the trainer stands still after a step."""
    arrive_s: float = 0.0
    """Seconds from a step's end until rollouts can take its version."""
    kv_reserve: float = 0.01
    """Share of the KV cache that is kept free at admission, and freed when the cache is full."""
    move_s: float = 0.0
    """Seconds for which a moved trajectory stands still before its prefill."""
    repack_every_s: float = 5.0
    speeds: tuple[float, ...] = (1.0,)
    """Relative speeds of the rollouts; the list repeats."""
    failures_per_hour: float = 0.0
    """Failures of each rollout. A failure loses the tokens since its last partial."""
    preemptions_per_hour: float = 0.0
    """Preemptions of each rollout. A preemption comes with notice and loses nothing."""
    repair_s: float = 252.0
    partial_every: int = 256
    """Tokens of a trajectory between two of its partials."""


@dataclass(frozen=True, slots=True)
class Job:
    """Holds the size of the training job and the dispatcher's settings."""

    groups_per_step: int
    steps: int
    skip: int = 0
    """Steps before the measurement starts."""
    max_lag: int = 4
    """η of the bounded policies, which limit the lag to η steps. The other policies may have (η +
    1)·B groups outstanding (B: `groups_per_step`), those of the present step included; that is the
    same number.
    """
    quota: int = 0
    """A rollout draws at most this many trajectories under one version; 0: 2 × slots."""
    queue_per_slot: float = 1.0
    dispatch_every_s: float = 0.25
    ends: bool = False
    """Admit only the groups that `steps` steps train, as a real run does. Otherwise the load stays
    constant to the end.
    """


def constant_values(**changed: float) -> dict[str, float]:
    """Returns the values of all constants with the `changed` ones replaced. Raises
    `ConfigurationError` for unknown names.
    """
    unknown = sorted(set(changed) - set(CONSTANTS))
    if unknown:
        raise ConfigurationError(
            f"constants: unknown {', '.join(unknown)}; see simulator/constants.py"
        )
    return {name: constant.value for name, constant in CONSTANTS.items()} | changed


def cluster_of(
    model: Model, gpus: int, share: float, policy: SchedulingPolicy, constants: ConstantValues
) -> Cluster:
    """Returns the cluster of `gpus` accelerators. The share `share` of them generates, unless the
    policy time-shares all between both sides. Raises `ConfigurationError` if the model and one
    longest answer do not fit a replica.
    """
    generating = gpus if policy.colocated else round(gpus * share / model.tp) * model.tp
    training = gpus if policy.colocated else gpus - generating
    if generating < model.tp or training < 1:
        raise ConfigurationError(
            f"{gpus} GPUs at rollout_share {share:g}: {generating} generate (a replica takes "
            f"{model.tp}), {training} train; both need some"
        )
    roofline = roofline_for(model, constants)
    capacity = kv_tokens(model, policy, constants)
    slots = int(constants["slots"])
    update_s, publish_s, arrive_s = transfers_s(model, policy, constants)
    flops = constants["train_flops_per_parameter"] * model.parameters
    return Cluster(
        rollouts=generating // model.tp,
        roofline=roofline,
        slots=slots,
        kv_capacity=capacity,
        batch_max=batch_max(roofline, slots),
        train_token_s=flops / (training * constants["gpu_flops"] * constants["train_mfu"]),
        train_fixed_s=constants["train_fixed_s"],
        update_s=update_s,
        publish_s=publish_s,
        arrive_s=arrive_s,
        kv_reserve=constants["kv_reserve"],
        move_s=constants["move_s"],
        repack_every_s=constants["repack_every_s"],
        repair_s=constants["repair_s"],
    )


def roofline_for(model: Model, constants: ConstantValues) -> Roofline:
    """Returns the roofline of one replica: `tp` GPUs share weights, cache and arithmetic, and
    synchronise twice per layer.
    """
    bandwidth = model.tp * constants["gpu_bandwidth"] * constants["bandwidth_share"]
    flops = model.tp * constants["gpu_flops"]
    waits_s = 2 * model.layers * constants["allreduce_s"] if model.tp > 1 else 0.0
    return Roofline(
        weights_s=model.weight_bytes() / bandwidth,
        kv_token_s=model.kv_bytes() / bandwidth,
        row_s=2 * model.parameters / (flops * constants["decode_flops_share"]),
        overhead_s=constants["step_overhead_s"] + waits_s,
        prefill_token_s=2 * model.parameters / (flops * constants["prefill_flops_share"]),
    )


def kv_tokens(model: Model, policy: SchedulingPolicy, constants: ConstantValues) -> int:
    """Returns the tokens that fit a replica's cache beside the weights. Raises `ConfigurationError`
    if one longest answer does not fit.
    """
    share = constants["memory_share_colocated" if policy.colocated else "memory_share"]
    free = model.tp * constants["gpu_memory"] * share - model.weight_bytes()
    tokens = int(free / model.kv_bytes())
    longest = int(constants["prompt_tokens"] + constants["length_max"])
    if tokens * (1 - constants["kv_reserve"]) < longest:
        raise ConfigurationError(
            f"a replica of {model.tp} GPUs caches {tokens} tokens, one answer may take {longest}: "
            "more GPUs per replica (tp) or a larger memory_share"
        )
    return tokens


def transfers_s(
    model: Model, policy: SchedulingPolicy, constants: ConstantValues
) -> tuple[float, float, float]:
    """Returns the seconds for which one version stops the rollout, the seconds for which it stops
    the trainer, and the seconds until rollouts can take it.
    """
    size = model.weight_bytes()
    if policy.colocated:
        return size / constants["switch_bandwidth"], 0.0, 0.0
    if policy.relay:
        pull_s = size / (model.tp * constants["pull_bandwidth"])
        stall_s = size / constants["relay_stall_bandwidth"]
        return pull_s, stall_s, stall_s + size / constants["relay_chain_bandwidth"]
    collective_s = size / constants["global_sync_bandwidth"]
    return collective_s, collective_s, 0.0


@dataclass(slots=True, eq=False)
class SimulatedRollout:
    """Holds the dispatcher's state of one rollout, with its replica."""

    replica: Replica
    speed: float = 1.0
    alive: bool = True
    failing: str = ""
    """The rollout dies at the end of the present step: `failure`, or `preemption` with notice."""
    pulling: bool = False
    wanted: int = 0
    """The version that the rollout takes next or is taking."""
    draining: bool = False
    """The rollout's quota is drawn and a newer version is visible; only the timeline uses it."""
    moving: dict[str, str] | None = None
    """Maps each trajectory that the rollout is about to give up to its target rollout, or to "" for
    a restart.
    """
    expecting: int = 0
    """Number of trajectories on their way to the rollout."""
    drawn: int = 0
    """Number of new trajectories since the rollout took its version or became empty."""
    tokens: float = 0.0
    """Predicted tokens of the rollout's trajectories."""
    kv_previous: int = 0
    """KV use at the last repack check, or the maximum under its version
    (`SchedulingPolicy.peak`).
    """

    def held(self) -> int:
        """Returns how many trajectories the rollout runs, queues or expects."""
        return len(self.replica.running) + len(self.replica.waiting) + self.expecting

    def is_open(self) -> bool:
        """Returns whether the rollout takes assignments."""
        return self.alive and not self.pulling and self.moving is None


@dataclass(slots=True)
class SimulatedGroup:
    """Tracks a group that is admitted and not complete: `missing` samples have not finished."""

    wave: int
    missing: int
    finished: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
