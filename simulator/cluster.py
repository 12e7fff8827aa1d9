"""The machines of a simulation (`Cluster`), made of a model, GPUs, a policy and the constants, the
work (`Job`), and dispatch's state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.simulator.constants import CONSTANTS, Model
from rollstream.simulator.drafting import DraftModel
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.replica import Replica
from rollstream.simulator.workload import SimulatedTrajectory

ConstantValues = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sizes in sequences and tokens, costs in seconds."""

    rollouts: int
    roofline: Roofline
    """Seconds of a decode step and of a prefill by rows and tokens."""
    slots: int
    kv_capacity: int
    """Of one rollout, in tokens."""
    batch_max: int
    """From it on another row is no longer nearly free in a decode step."""
    train_token_s: float
    """Per token, on all training GPUs together."""
    train_fixed_s: float
    update_s: float
    """A rollout stands still to take new weights."""
    publish_s: float = 0.0
    """The trainer stands still after a step."""
    arrive_s: float = 0.0
    """From a step's end until rollouts can take its version."""
    kv_reserve: float = 0.01
    """Share of the KV cache kept free at admission, and freed when the cache is full."""
    move_s: float = 0.0
    """A moved trajectory stands still before its prefill."""
    repack_every_s: float = 5.0
    speeds: tuple[float, ...] = (1.0,)
    """Relative; the list repeats."""
    kv_shares: tuple[float, ...] = (1.0,)
    """Shares of `kv_capacity`; the list repeats."""
    failures_per_hour: float = 0.0
    """Of each rollout; they lose the tokens since its last partial."""
    preemptions_per_hour: float = 0.0
    """Of each rollout, with notice: no tokens are lost."""
    repair_s: float = 252.0
    """From the end of a rollout until it is back."""
    partial_every: int = 256
    """Tokens between two partials of a trajectory."""
    drafts: DraftModel | None = None
    """Under policies with `drafts`."""
    rollouts_per_host: int = 1
    host_pull_s: float = 0.0
    """A pull occupies the link of its host, where pulls queue."""


@dataclass(frozen=True, slots=True)
class Job:
    groups_per_step: int
    steps: int
    skip: int = 0
    max_lag: int = 4
    """Policies with `bounded` limit the lag to this many steps, the others the groups that are
    admitted and not trained to (`max_lag` + 1) · `groups_per_step`.
    """
    quota: int = 0
    """New trajectories of a rollout under one version; 0: 2 × slots."""
    queue_per_slot: float = 1.0
    """Trajectories that may wait, as a multiple of slots."""
    dispatch_every_s: float = 0.25
    ready_groups_max: int = 0
    """Admitted groups that no step has taken, without `bounded`; 0: `max_lag` · `groups_per_step`.
    """
    micro_batch_tokens: int = 0
    """A step that starts early takes groups once they have so many tokens, or if they complete it;
    0: a sixteenth of its groups at a time.
    """
    ends: bool = False
    """Admits only the groups of `steps` steps, as a real run does."""


def constant_values(**changed: float) -> dict[str, float]:
    """Returns the constant values with the `changed` ones replaced. Raises `ConfigurationError` for
    unknown names.
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
    """`share` of the `gpus` generate and the others train; under a `colocated` policy all do both
    in turn. Raises `ConfigurationError` if one side gets too few GPUs, or if a replica cannot hold
    the model and one longest answer.
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
    update_s, publish_s, arrive_s = transfers_s(model, policy, constants, generating)
    per_host = max(1, int(constants["gpus_per_host"]) // model.tp)
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
        drafts=DraftModel(
            constants["draft_found"], constants["draft_rate"], constants["draft_lookup_s"]
        ),
        rollouts_per_host=per_host if policy.relay else 1,
        host_pull_s=published_bytes(model, policy, constants) / constants["host_bandwidth"]
        if policy.relay
        else 0.0,
    )


def roofline_for(model: Model, constants: ConstantValues) -> Roofline:
    """Returns the roofline of one replica: `tp` GPUs share weights, cache and arithmetic."""
    bandwidth = model.tp * constants["gpu_bandwidth"] * constants["bandwidth_share"]
    flops = model.tp * constants["gpu_flops"]
    # The GPUs synchronise twice per layer.
    waits_s = 2 * model.layers * constants["allreduce_s"] if model.tp > 1 else 0.0
    return Roofline(
        weights_s=model.weight_bytes() / bandwidth,
        kv_token_s=model.kv_bytes() / bandwidth,
        row_s=2 * model.parameters / (flops * constants["decode_flops_share"]),
        overhead_s=constants["step_overhead_s"] + waits_s,
        prefill_token_s=2 * model.parameters / (flops * constants["prefill_flops_share"]),
    )


def kv_tokens(model: Model, policy: SchedulingPolicy, constants: ConstantValues) -> int:
    """Returns tokens that fit a replica's cache beside the weights. Raises `ConfigurationError` if
    one longest answer does not fit.
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


def published_bytes(model: Model, policy: SchedulingPolicy, constants: ConstantValues) -> float:
    """Returns the published bytes of all weights, or of an adapter."""
    return model.weight_bytes() * (constants["adapter_share"] if policy.adapters else 1.0)


def transfers_s(
    model: Model, policy: SchedulingPolicy, constants: ConstantValues, generating: int
) -> tuple[float, float, float]:
    """Returns the seconds of a new version: each rollout stands still to load it, the trainer
    stands still to publish it, and from the end of the step until rollouts can load it.
    """
    size = published_bytes(model, policy, constants)
    if policy.colocated:
        return size / constants["switch_bandwidth"], 0.0, 0.0
    if policy.relay:
        pull_s = size / (model.tp * constants["pull_bandwidth"])
        stall_s = size / constants["relay_stall_bandwidth"]
        # Relays form a chain over the hosts: the last one has the last chunk one chunk's time per
        # hop after the first.
        hops = max(0, ceil(generating / constants["gpus_per_host"]) - 1)
        sent = size + hops * min(size, constants["relay_chunk_bytes"])
        return pull_s, stall_s, stall_s + sent / constants["relay_chain_bandwidth"]
    collective_s = size / constants["global_sync_bandwidth"]
    return collective_s, collective_s, 0.0


@dataclass(slots=True, eq=False)
class SimulatedRollout:
    """Dispatch's state of one rollout, and its replica."""

    replica: Replica
    speed: float = 1.0
    kind: int = 0
    """By speed, 0 for the slowest (`dispatch/kinds.py`)."""
    alive: bool = True
    failing: str = ""
    """Why it dies at the end of its present decode step: `failure` or `preemption`; else ""."""
    pulling: bool = False
    """It loads new weights and takes no work."""
    wanted: int = 0
    """The version that it takes next or is taking."""
    draining: bool = False
    """It has used up its quota and a newer version is available; for the timeline only."""
    moving: dict[str, str] | None = None
    """Trajectories that it is about to give up → target rollout, or "" for a restart."""
    expecting: int = 0
    """Trajectories on their way to it."""
    drawn: int = 0
    """New trajectories since it took its version, or under `batches` became empty."""
    tokens: float = 0.0
    kv_previous: int = 0
    """Cached tokens at the last repack check; with `SchedulingPolicy.peak` the most under the
    present version.
    """

    def held(self) -> int:
        replica = self.replica
        return len(replica.running) + len(replica.waiting) + len(replica.parked) + self.expecting

    def is_open(self) -> bool:
        return self.alive and not self.pulling and self.moving is None


@dataclass(slots=True)
class SimulatedGroup:
    """Admitted and not complete: `missing` of its samples have not finished."""

    wave: int
    missing: int
    finished: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
