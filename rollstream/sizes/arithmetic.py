"""Every formula of a plan, with each constant and its source beside it: memory of a trainer's rank
and of a rollout, bytes of a version, seconds on a link, tokens per second, volume of the log.

A formula counts the tensors that the code of this project allocates, so it names the file that
allocates them. `benchmarks/sizes/plan_error.py` compares the sums with measured peaks. All sizes
are in bytes, all durations in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollstream.consumers.settings import TrainerSettings
from rollstream.simulator.constants import CONSTANTS
from rollstream.sizes.devices import Accelerator
from rollstream.sizes.shapes import ModelShape
from rollstream.storage.checkpoints import SHARD_BYTES as CHECKPOINT_FILE_BYTES

FLOAT32, BFLOAT16 = 4, 2

STATE_BYTES = 16
"""Per trained parameter: float32 master, sum of gradients and AdamW's two moments
(`consumers/trainer/learn/masters.py`, `learner.py`).
"""
LOGITS_SLICE = 1 << 24
"""Logits in memory at once (`LOGITS_MAX` in `consumers/trainer/learn/scores.py`)."""
LOGITS_COPIES = 4
"""Float32 copies of a slice: logits, divided by the temperature, log-softmax, probabilities
(`_ScoreFunction` in `scores.py`).
"""
PREFETCHED_GROUPS = 2
"""Layers that FSDP2 holds gathered: the one that computes and the next (torch 2.13, implicit
prefetch of `fully_shard`).
"""
CONTEXT_BYTES = 0.6e9
"""CUDA context, cuBLAS workspaces and NCCL buffers of one process; assumed, 0.4 to 1 GB."""
FRAGMENTED = 0.05
"""Share of a card that torch's caching allocator cannot use; assumed, 0.02 to 0.10."""
COPIES = 2
"""Copies of the published tensors in host memory: the base and the one being published."""
CHECKPOINT_BYTES = 12
"""Per trained parameter in a checkpoint, and in host memory while it is written."""
LENT_BYTES_MIN = 1e9  # as in `consumers/trainer/learn/workers.py`
SPARE_COLUMNS = 256
"""Columns of the torch engine's cache beyond the context (`engines/torch/attention.py`)."""
PREFIX_SHARE = 4
"""The prefix cache holds at most slots · context / 4 tokens (`engines/torch/engine.py`)."""
PREFILL_TOKENS = 1024
"""Tokens that the torch engine prefills at once (`AHEAD_TOKENS` in `engines/torch/prefill.py`)."""
UPDATE_COPIES = 2
"""Float32 copies of the largest tensor while it is loaded or compared: the cast and its product
with the norm's factor (`engines/torch/weights.py`).
"""
VLLM_STEP_TOKENS = 8192
"""Tokens of a step that vLLM reserves activations for: its default `max_num_batched_tokens` for
throughput on large cards; assumed, 2048 on small ones.
"""
VLLM_FIXED_BYTES = 1.5e9
"""CUDA graphs, sampler and workspaces of a vLLM engine on one card; assumed, 1 to 3 GB."""
DELTA_SHARE = 1 / 165
"""Bytes of a delta over those of the full version, measured at lr 1e-6 with 30 M parameters
(docs/reference/sizes-and-cost.md); PULSE reports 1 / 130 at 7B. At lr 1e-4 and above it approaches
1.
"""
LOG_TOKEN_BYTES, LOG_RECORD_BYTES = 9.0, 1000.0
PARTIALS_SHARE = 0.5
ARCHIVE_TOKEN_BYTES, ARCHIVE_RECORD_BYTES = 5.0, 200.0
"""A trajectory in log, partials and archive (docs/reference/sizes-and-cost.md)."""
# Shares of a card's peaks, and host-to-device speed: sources in `simulator/constants.py`.
MFU = CONSTANTS["train_mfu"].value
FLOPS_PER_PARAMETER = 6.0  # forward 2, backward 4; recomputed layers add 2 more
DECODE_BANDWIDTH = CONSTANTS["bandwidth_share"].value
DECODE_FLOPS = CONSTANTS["decode_flops_share"].value
STEP_OVERHEAD_S = CONSTANTS["step_overhead_s"].value
PULL_BANDWIDTH = CONSTANTS["pull_bandwidth"].value


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One part of a process's memory."""

    what: str
    bytes: float


def total(lines: Sequence[MemoryLine]) -> float:
    """The sum of the lines."""
    return sum(line.bytes for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerForm:
    """How a model is trained: the settings that decide a rank's memory. `lora_rank` None trains all
    parameters.
    """

    micro_batch_tokens: int
    ranks: int = 1
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: bool = False
    workers: int = 1
    lora_rank: int | None = None

    @property
    def item(self) -> int:
        """Bytes of a number in a layer's arithmetic."""
        return BFLOAT16 if self.compute == "bfloat16" else FLOAT32

    @property
    def is_packed(self) -> bool:
        """Whether `learn/llama.py` computes the passes, in one process (`policy_scorer`)."""
        return self.compute == "float32" and not self.recompute and self.ranks == 1


def form_of(settings: TrainerSettings, ranks: int, lora_rank: int = 0) -> TrainerForm:
    """The form of these settings on `ranks` processes."""
    return TrainerForm(
        micro_batch_tokens=settings.micro_batch_tokens,
        ranks=ranks,
        compute=settings.compute,
        recompute=settings.gradient_checkpointing,
        workers=settings.workers if ranks == 1 else 1,
        lora_rank=lora_rank or None,
    )


# ---- a rank of the trainer -----------------------------------------------------------------------


def trained_parameters(shape: ModelShape, form: TrainerForm) -> int:
    """Parameters with master, gradient and moments."""
    if form.lora_rank is None:
        return shape.parameters
    return shape.adapter_parameters(form.lora_rank)


def trainer_lines(shape: ModelShape, form: TrainerForm) -> tuple[MemoryLine, ...]:
    """A rank's memory on its device, without context and fragmentation."""
    trained = trained_parameters(shape, form)
    lines = [MemoryLine("masters, gradients, moments", STATE_BYTES * trained / form.ranks)]
    if form.lora_rank is not None:
        lines.append(MemoryLine("frozen base", form.item * shape.parameters / form.ranks))
    if form.ranks > 1:
        lines += _gathered_lines(shape, form)
    elif form.compute == "bfloat16" and form.lora_rank is None:
        lines.append(MemoryLine("bfloat16 weights", BFLOAT16 * trained))
    return (*lines, *_pass_lines(shape, form))


def _gathered_lines(shape: ModelShape, form: TrainerForm) -> list[MemoryLine]:
    """What FSDP2 holds beside a rank's slices (`shard_model` in `sharded/tensors.py`): layers are
    gathered in the type of the arithmetic and reduced in float32; embedding, final norm and head
    are one group, in float32, which stays gathered from the forward to the backward pass.
    """
    layer, root = shape.layer_parameters, shape.root_parameters
    lines = [
        MemoryLine("gathered layers", PREFETCHED_GROUPS * form.item * layer),
        MemoryLine("gathered embedding and head", FLOAT32 * root),
    ]
    if form.lora_rank is None:
        lines.append(MemoryLine("gradients of one layer, to reduce", (form.item + FLOAT32) * layer))
        lines.append(MemoryLine("gradients of embedding and head", FLOAT32 * root))
    return lines


def _pass_lines(shape: ModelShape, form: TrainerForm) -> list[MemoryLine]:
    """The largest sum of what a forward pass keeps and what its backward pass has made so far, for
    each worker: activations go as gradients come, so the peak is at one end of the backward pass.
    """
    kept = kept_bytes(shape, form)
    head = _head_bytes(shape, form)
    made = 0.0
    if form.ranks == 1:
        made = form.item * trained_parameters(shape, form)
        if form.lora_rank is None and shape.tied:
            # The embedding's own gradient, before it is added to that of the head.
            made += form.item * shape.embedding_parameters
    return [
        MemoryLine("activations of a micro-batch", form.workers * kept),
        MemoryLine("head and logits", form.workers * head),
        MemoryLine("gradients beyond them", form.workers * max(0.0, made - kept)),
    ]


def kept_bytes(shape: ModelShape, form: TrainerForm) -> float:
    """Bytes that the forward pass of one micro-batch keeps for the backward pass."""
    tokens, d = form.micro_batch_tokens, shape.hidden
    if form.is_packed and shape.experts is None:
        rotations = FLOAT32 * tokens * (shape.query_size + shape.kv_size)
        return shape.layers * _packed_layer_bytes(shape, tokens) + rotations
    layer = tokens * general_layer_numbers(shape, form.item)
    if not form.recompute:
        return shape.layers * layer
    return form.item * tokens * d * shape.layers + layer


def _packed_layer_bytes(shape: ModelShape, tokens: int) -> float:
    """A layer of `PackedDecoder`: two norms, rotated queries and keys (before it also their norm),
    values, attention's output twice, gate and up with their SiLU and product; and the copies of its
    matrices with the norms' gains, of which queries, keys, gate and up are also joined.
    """
    d, q, kv, f = shape.hidden, shape.query_size, shape.kv_size, shape.intermediate
    numbers = 2 * d + (q + kv) * (3 if shape.has_head_norms else 1) + kv + 2 * q + 4 * f
    folded = 2 * d * (q + kv) + d * kv + 2 * (2 * d * f)
    return FLOAT32 * (tokens * numbers + folded)


def general_layer_numbers(shape: ModelShape, item: int) -> float:
    """Bytes per token that a layer of transformers keeps: of each norm its float32 input and two
    results; queries, keys and values as all heads attend to them, attention's output; of the
    feed-forward part gate, its SiLU, up and their product (Korthikanti et al., arXiv 2205.05198,
    for this kind of layer).
    """
    d, q = shape.hidden, shape.query_size
    norms = 2 * (FLOAT32 + 2 * item) * d
    if shape.has_head_norms:
        norms += (FLOAT32 + item) * (q + shape.kv_size)
    attention = item * 4 * q + FLOAT32 * shape.heads
    inputs = 0 if shape.experts is None else shape.experts.used * d  # each expert's own rows
    return norms + attention + item * (4 * shape.feed_forward + inputs)


def _head_bytes(shape: ModelShape, form: TrainerForm) -> float:
    """The float32 head with its gradient, the states before it, and the logits of one slice."""
    tokens = form.micro_batch_tokens
    logits = min(LOGITS_SLICE, tokens * shape.vocabulary) * FLOAT32 * LOGITS_COPIES
    states = 2 * FLOAT32 * tokens * shape.hidden
    has_own_head = form.ranks == 1  # with several ranks the gathered one is float32 already
    copies = 2 if has_own_head and form.lora_rank is None else int(has_own_head)
    return logits + states + copies * FLOAT32 * shape.embedding_parameters


def trainer_host_lines(
    shape: ModelShape, form: TrainerForm, published_item: int, on_cpu: bool = False
) -> tuple[MemoryLine, ...]:
    """A rank's host memory beside its libraries. On the CPU it comes on top of the device's, and a
    large state is written from the trainer's own memory.
    """
    own = trained_parameters(shape, form) / form.ranks
    is_lent = on_cpu and CHECKPOINT_BYTES * own > LENT_BYTES_MIN
    return (
        MemoryLine("copies being published", COPIES * published_item * own),
        MemoryLine("checkpoint being written", 0.0 if is_lent else CHECKPOINT_BYTES * own),
        MemoryLine("one file of it", min(CHECKPOINT_FILE_BYTES, CHECKPOINT_BYTES * own)),
    )


def micro_batch_max(shape: ModelShape, form: TrainerForm, memory: float, step: int) -> int:
    """The largest multiple of `step` tokens, at most 2^17, whose sum of lines is within `memory`; 0
    if not even one step fits.
    """
    low, high = 0, (1 << 17) // step

    def fits(steps: int) -> bool:
        return total(trainer_lines(shape, replace(form, micro_batch_tokens=steps * step))) <= memory

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * step


# ---- a rollout -----------------------------------------------------------------------------------


def torch_engine_lines(
    shape: ModelShape, slots: int, context: int, item: int, published_item: int
) -> tuple[MemoryLine, ...]:
    """The embedded engine and the version that its rollout holds (`engines/torch/`,
    `rollout/weights.py`).
    """
    layers = shape.layers * shape.layer_parameters
    head = FLOAT32 * shape.embedding_parameters  # float32 whatever the layers are
    kv = item * shape.kv_numbers
    passes = PREFILL_TOKENS * (
        2 * kv + item * (2 * shape.feed_forward + 3 * shape.hidden + 2 * shape.query_size)
    )
    return (
        MemoryLine("weights", item * (layers + shape.embedding_parameters) + head),
        MemoryLine("KV cache", (slots + 1) * (context + SPARE_COLUMNS) * kv),
        MemoryLine("prefix cache", slots * context / PREFIX_SHARE * kv),
        MemoryLine(
            "prefill and logits", passes + LOGITS_COPIES * FLOAT32 * slots * shape.vocabulary
        ),
        MemoryLine("version held by the rollout", published_item * shape.parameters),
        MemoryLine("an update's largest tensor", UPDATE_COPIES * head),
    )


def vllm_lines(
    shape: ModelShape, tensor_parallel: int, slots: int, item: float
) -> tuple[MemoryLine, ...]:
    """One card of a vLLM engine without its KV cache, which gets the rest of its share. The head is
    float32 (`rollouts.vllm.head_float32`).
    """
    head = FLOAT32 * shape.embedding_parameters
    weights = item * shape.layers * shape.layer_parameters + BFLOAT16 * shape.root_parameters
    passes = VLLM_STEP_TOKENS * BFLOAT16 * (4 * shape.hidden + 3 * _step_width(shape))
    return (
        MemoryLine("weights", (weights + head) / tensor_parallel),
        MemoryLine("activations of a step", passes / tensor_parallel),
        MemoryLine("logits", LOGITS_COPIES * FLOAT32 * slots * shape.vocabulary / tensor_parallel),
        MemoryLine("graphs and workspaces", VLLM_FIXED_BYTES),
    )


def _step_width(shape: ModelShape) -> float:
    """The widest row of a layer: gate and up, or queries, keys and values."""
    return max(shape.feed_forward, shape.query_size + 2 * shape.kv_size)


def kv_tokens(shape: ModelShape, tensor_parallel: int, free: float) -> int:
    """Tokens that `free` bytes of each card cache. A card caches whole heads, so beyond `kv_heads`
    cards each head is cached more than once.
    """
    split = min(tensor_parallel, shape.kv_heads)
    return max(0, int(free * split / (BFLOAT16 * shape.kv_numbers)))


# ---- versions, links, speeds, volumes ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """Bytes of one version in each of its forms."""

    full: float
    delta: float
    adapter: float


def version_bytes(shape: ModelShape, lora_rank: int) -> VersionBytes:
    """A bfloat16 version: full, as a delta, and as a LoRA adapter of this rank."""
    full = BFLOAT16 * float(shape.parameters)
    return VersionBytes(full, full * DELTA_SHARE, BFLOAT16 * shape.adapter_parameters(lora_rank))


def train_tokens_per_s(
    shape: ModelShape, card: Accelerator, form: TrainerForm, link: float
) -> float:
    """Trained tokens per second of all ranks; 0 where the card's speed is unknown. A round of one
    micro-batch per rank takes as long as its arithmetic or as its collectives over `link` bytes/s
    per card, whichever is longer: parameters are gathered twice, gradients reduced in float32.
    """
    if not card.flops:
        return 0.0
    flops = (FLOPS_PER_PARAMETER + 2 * form.recompute) * shape.active_parameters
    compute_s = form.micro_batch_tokens * flops / (card.flops * MFU)
    moved = 2 * form.item * shape.parameters + FLOAT32 * trained_parameters(shape, form)
    gather_s = 0.0 if form.ranks == 1 else moved * (1 - 1 / form.ranks) / link
    return form.ranks * form.micro_batch_tokens / max(compute_s, gather_s)


def decode_tokens_per_s(
    shape: ModelShape, card: Accelerator, tensor_parallel: int, rows: int, context: int, item: float
) -> float:
    """Generated tokens per second of one engine with `rows` rows that have half of the context on
    average: a step reads the weights and the cache, and computes each row.
    """
    if not card.bandwidth or not rows:
        return 0.0
    bandwidth = tensor_parallel * card.bandwidth * DECODE_BANDWIDTH
    read = item * _read_parameters(shape, rows) + rows * context / 2 * BFLOAT16 * shape.kv_numbers
    compute_s = 2 * shape.active_parameters * rows / (tensor_parallel * card.flops * DECODE_FLOPS)
    return rows / (STEP_OVERHEAD_S + max(read / bandwidth, compute_s))


def _read_parameters(shape: ModelShape, rows: int) -> float:
    """Parameters that a step reads: with many rows all experts are used."""
    if shape.experts is None:
        return shape.parameters
    share = min(1.0, rows * shape.experts.used / shape.experts.count)
    active = shape.active_parameters
    return active + share * (shape.parameters - active)


def transfer_s(size: float, gbps: float) -> float:
    """Seconds on a link of this many Gbit/s."""
    return size * 8 / (gbps * 1e9)


def load_s(size: float, cards: int) -> float:
    """Seconds from host memory to `cards` cards."""
    return size / (cards * PULL_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class LogVolume:
    """Bytes per second into the log, and into the archive."""

    log: float
    archive: float


def log_volume(tokens_per_s: float, trajectory_tokens: float) -> LogVolume:
    """The volume of trajectories of this mean length, with partials."""
    per_s = tokens_per_s / trajectory_tokens
    record = LOG_TOKEN_BYTES * trajectory_tokens * (1 + PARTIALS_SHARE) + LOG_RECORD_BYTES
    archived = ARCHIVE_TOKEN_BYTES * trajectory_tokens + ARCHIVE_RECORD_BYTES
    return LogVolume(per_s * record, per_s * archived)
