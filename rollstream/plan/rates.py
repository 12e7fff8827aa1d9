"""Estimates in bytes and seconds. Rates are rooflines: good for the choice of a layout and for an
order of magnitude.
"""

from dataclasses import dataclass
from math import ceil

from rollstream.run.sizes.arithmetic import BFLOAT16, FLOAT32, TrainerForm
from rollstream.run.sizes.devices import CARDS_PER_MACHINE, Accelerator
from rollstream.run.sizes.shapes import ModelShape
from rollstream.simulator.constants import CONSTANTS

DELTA_SHARE = 1 / 165
"""Bytes of a delta over those of the full version. Measured at lr 1e-6 with 30 M parameters
(docs/explanation/benchmarks.md, delta); the paper PULSE reports 1 / 130 at 7B parameters. At lr
1e-4 and above the share approaches 1.
"""
LOG_TOKEN_BYTES, LOG_RECORD_BYTES = 9.0, 1000.0
"""Of a trajectory in the log, per token and record (docs/reference/sizes-and-cost.md)."""
PARTIALS_SHARE = 0.5
"""Upper bound of what its partials add, over its token bytes (docs/reference/sizes-and-cost.md)."""
ARCHIVE_TOKEN_BYTES, ARCHIVE_RECORD_BYTES = 5.0, 200.0
"""Of a trajectory in the archive, per token and record (docs/reference/sizes-and-cost.md)."""
# Shares of a card's peaks, fixed times, host-to-device speed: sources in `simulator/constants.py`.
MFU = CONSTANTS["train_mfu"].value
FLOPS_PER_PARAMETER = 6.0
"""Operations per parameter and trained token: forward 2, backward 4 (Kaplan et al., arXiv
2001.08361); recomputed layers add 2.
"""
DECODE_BANDWIDTH = CONSTANTS["bandwidth_share"].value
DECODE_FLOPS = CONSTANTS["decode_flops_share"].value
STEP_OVERHEAD_S = CONSTANTS["step_overhead_s"].value
ALLREDUCE_S = CONSTANTS["allreduce_s"].value
TRAIN_FIXED_S = CONSTANTS["train_fixed_s"].value
PULL_BANDWIDTH = CONSTANTS["pull_bandwidth"].value


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """Bytes of one version in each of its forms."""

    full: float
    delta: float
    adapter: float


def version_bytes(shape: ModelShape, lora_rank: int) -> VersionBytes:
    """Returns the bytes of a bfloat16 version, and of a LoRA adapter of this rank."""
    full = BFLOAT16 * float(shape.parameters)
    return VersionBytes(full, full * DELTA_SHARE, BFLOAT16 * shape.adapter_parameters(lora_rank))


@dataclass(frozen=True, slots=True)
class TrainerLink:
    """The trainer's kind of card, and the bytes per second that a collective operation moves
    through each card.
    """

    card: Accelerator
    collective: float


def trainer_link(card: Accelerator, ranks: int, network_gbps: float) -> TrainerLink:
    if ranks <= CARDS_PER_MACHINE:
        return TrainerLink(card, card.link)
    # A ring of cards passes each machine's network once, and all rings share that network (the "bus
    # bandwidth" of nccl-tests).
    return TrainerLink(card, min(card.link, network_gbps * 1e9 / 8))


def round_s(shape: ModelShape, form: TrainerForm, at: TrainerLink) -> tuple[float, float]:
    """Returns the seconds of the arithmetic and of the collectives of one round, in which each rank
    computes one micro-batch; the two overlap.
    """
    flops = (FLOPS_PER_PARAMETER + 2 * form.recompute) * shape.active_parameters
    compute_s = form.micro_batch_tokens * flops / (at.card.flops * MFU)
    if form.ranks == 1:
        return compute_s, 0.0
    layers, root = shape.layers * shape.layer_parameters, shape.root_parameters
    # Layers are gathered twice (forward and backward pass) in the type of the arithmetic, embedding
    # and head once in float32, and all gradients are reduced in float32 (`shard_model`).
    moved = (2 * form.item + FLOAT32) * layers + 2 * FLOAT32 * root
    return compute_s, moved * (1 - 1 / form.ranks) / at.collective


def train_tokens_per_s(
    shape: ModelShape, form: TrainerForm, at: TrainerLink, step_tokens: float
) -> float:
    """Returns the tokens per second that all ranks train, in steps of `step_tokens` tokens; 0 for
    unknown speeds.
    """
    if not at.card.flops:
        return 0.0
    # In the last round some ranks may have no micro-batch.
    rounds = ceil(ceil(step_tokens / form.micro_batch_tokens) / form.ranks)
    return step_tokens / (TRAIN_FIXED_S + rounds * max(round_s(shape, form, at)))


def decode_tokens_per_s(
    shape: ModelShape,
    card: Accelerator,
    tensor_parallel: int,
    rows: float,
    context: int,
    item: float,
) -> float:
    """Returns the tokens per second that one engine generates with `rows` running sequences on
    average, each with half of the context; 0 for unknown speeds.
    """
    if not card.bandwidth or not rows:
        return 0.0
    bandwidth = tensor_parallel * card.bandwidth * DECODE_BANDWIDTH
    # A step reads the weights (`item` bytes per parameter) and the KV cache.
    read = item * _read_parameters(shape, rows) + rows * context / 2 * BFLOAT16 * shape.kv_numbers
    compute_s = 2 * shape.active_parameters * rows / (tensor_parallel * card.flops * DECODE_FLOPS)
    # Two results of each layer.
    summed_s = 2 * shape.layers * ALLREDUCE_S if tensor_parallel > 1 else 0.0
    return rows / (STEP_OVERHEAD_S + summed_s + max(read / bandwidth, compute_s))


def _read_parameters(shape: ModelShape, rows: float) -> float:
    if shape.experts is None:
        return shape.parameters
    # A mixture of experts reads those experts that its rows use.
    share = min(1.0, rows * shape.experts.used / shape.experts.count)
    active = shape.active_parameters
    return active + share * (shape.parameters - active)


def transfer_s(size: float, gbps: float) -> float:
    """Returns the seconds of `size` bytes on a link of this many Gbit/s."""
    return size * 8 / (gbps * 1e9)


def load_s(size: float, cards: int) -> float:
    """Returns the seconds of `size` bytes from host memory to `cards` cards."""
    return size / (cards * PULL_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class LogVolume:
    """Bytes per second written to the log and to the archive."""

    log: float
    archive: float


def log_volume(tokens_per_s: float, trajectory_tokens: float) -> LogVolume:
    """Returns the volume of trajectories of this mean length (in tokens) and of their partials,
    which are not archived.
    """
    per_s = tokens_per_s / trajectory_tokens
    record = LOG_TOKEN_BYTES * trajectory_tokens * (1 + PARTIALS_SHARE) + LOG_RECORD_BYTES
    archived = ARCHIVE_TOKEN_BYTES * trajectory_tokens + ARCHIVE_RECORD_BYTES
    return LogVolume(per_s * record, per_s * archived)
