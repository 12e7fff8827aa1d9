"""Memory of a trainer's rank and of the embedded engine, in bytes, by the tensors that this
project's code allocates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollstream.consumers.credit import GAE
from rollstream.consumers.objective_settings import past_policies
from rollstream.consumers.settings import TrainerSettings
from rollstream.run.sizes.shapes import ModelShape
from rollstream.storage.settings import MEMORY_FILE_BYTES
from rollstream.storage.weights.checkpoints import SHARD_BYTES as CHECKPOINT_FILE_BYTES

# `benchmarks/sizes/plan_error.py` compares the sums with measured peaks.
FLOAT32, BFLOAT16 = 4, 2
"""Bytes of one number (IEEE 754)."""

STATE = "masters, gradients, moments"
STATE_BYTES = 16
"""A trained parameter's float32 master, sum of gradients and AdamW's two moments
(`consumers/trainer/learn/masters.py`, `learner.py`).
"""
LOGITS_SLICE = 1 << 24
"""Logits in memory at once (`LOGITS_MAX` in `consumers/trainer/learn/scores.py`)."""
LOGITS_COPIES = 4
"""Of a slice in float32: logits, divided by the temperature, log-softmax, probabilities
(`_ScoreFunction` in `scores.py`).
"""
PREFETCHED_GROUPS = 2
"""Layers that FSDP2 holds gathered: the one that computes and the next (torch 2.13, implicit
prefetch of `fully_shard`).
"""
CONTEXT_BYTES = 0.6e9
"""CUDA context, cuBLAS workspaces and NCCL buffers of one process. A choice, as no document states
it: half for a context with lazily loaded kernels, 32 MiB of cuBLAS on Hopper (torch's notes on CUDA
semantics), 4 MiB for each channel and peer of NCCL (`NCCL_BUFFSIZE`).
"""
FRAGMENTED = 0.05
"""Share of a card that torch's caching allocator cannot use. A choice: it splits segments of 20 MiB
and rounds larger requests to 2 MiB (`c10/cuda/CUDACachingAllocator.cpp`).
"""
COPIES = 2
"""Of the published tensors in host memory: the next delta's base, and those being published
(`consumers/trainer/publisher.py`); two more wait where the store is slow.
"""
CHECKPOINT_BYTES = 12
"""Per trained parameter, and in host memory during the write: float32 master and two moments
(`consumers/trainer/checkpoint.py`).
"""
LOW_BIT_BYTES = FLOAT32 + 2 * (1 + FLOAT32 / 256)
"""With moments of 8 bits, whose blocks of 256 have a float32 scale (`learn/low_bit.py`)."""
LENT_BYTES_MIN = 1e9
"""A larger state in host memory is saved without a copy (`consumers/trainer/learn/workers.py`)."""
SPARE_COLUMNS = 256
"""Beyond the context, in a row of the KV cache (`engines/torch/attention.py`)."""
PREFIX_SHARE = 4
"""The prefix cache holds up to slots · context / 4 tokens (`engines/torch/engine.py`)."""
PREFILL_TOKENS = 1024
"""Tokens of one prefill (`AHEAD_TOKENS` in `engines/torch/prefill.py`)."""
UPDATE_COPIES = 2
"""Float32, of the largest tensor while it is loaded: the cast and its product with the norm's
factor (`engines/torch/weights.py`).
"""
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class MemoryLine:
    what: str
    bytes: float


def total(lines: Sequence[MemoryLine]) -> float:
    return sum(line.bytes for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerForm:
    """With `recompute` a layer keeps only its input for the backward pass; `workers` micro-batches
    are computed at once; `lora_rank` None trains all parameters.
    """

    micro_batch_tokens: int
    ranks: int = 1
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: bool = False
    workers: int = 1
    lora_rank: int | None = None
    offload: bool = False
    """Masters, moments and sum of gradients are in host memory (`trainer.cpu_offload`)."""
    other_policies: int = 0
    """Models beside the trained one (`objectives/policies/`)."""
    critic: bool = False
    """A critic with a body of its own is trained too (`objectives/critic/`)."""
    low_bit: bool = False
    """The policy's moments have 8 bits; a critic's have 32."""

    @property
    def saved(self) -> float:
        """Returns the bytes of a parameter's master and moments."""
        return LOW_BIT_BYTES if self.low_bit else CHECKPOINT_BYTES

    @property
    def item(self) -> int:
        """Returns the bytes of a number in a layer's arithmetic."""
        return BFLOAT16 if self.compute == "bfloat16" else FLOAT32

    @property
    def is_packed(self) -> bool:
        """Returns whether `learn/llama.py` computes the passes (`policy_scorer`)."""
        return self.compute == "float32" and self.ranks == 1


def form_of(settings: TrainerSettings, ranks: int, lora_rank: int = 0) -> TrainerForm:
    """Returns the form on `ranks` processes."""
    return TrainerForm(
        micro_batch_tokens=settings.micro_batch_tokens,
        ranks=ranks,
        compute=settings.compute,
        recompute=settings.gradient_checkpointing,
        workers=settings.workers if ranks == 1 else 1,
        lora_rank=lora_rank or None,
        offload=settings.cpu_offload,
        other_policies=len(past_policies(settings)),
        critic=settings.advantage == GAE and settings.critic.body == "own",
        low_bit=settings.optimiser == "adamw_8bit",
    )


def trained_parameters(shape: ModelShape, form: TrainerForm) -> int:
    """Returns the trained parameters with master, gradient and moments."""
    if form.lora_rank is None:
        return shape.parameters
    return shape.adapter_parameters(form.lora_rank)


def trainer_lines(shape: ModelShape, form: TrainerForm) -> tuple[MemoryLine, ...]:
    """Returns the memory on a rank's device, without context and fragmentation (see `usable`)."""
    lines: list[MemoryLine] = []
    if not form.offload:
        state = (form.saved + FLOAT32) * own_parameters(shape, form)
        lines.append(MemoryLine(STATE, state))
    if form.lora_rank is not None:
        base = 0 if form.offload and form.ranks > 1 else _held_parameters(shape, form.ranks)
        lines.append(MemoryLine("frozen base", form.item * base))
    if form.other_policies:
        each = form.item * (shape.parameters + shape.adapter_parameters(form.lora_rank or 0))
        lines.append(MemoryLine("reference and proximal policy", form.other_policies * each))
    if form.critic:
        lines.append(MemoryLine("critic", _critic_bytes(shape, form)))
    passes = _pass_lines(shape, form)
    if form.ranks > 1:
        lines += _gathered_lines(shape, form, total(passes))
    elif (form.compute == "bfloat16" or form.offload) and form.lora_rank is None:
        lines.append(MemoryLine(f"{form.compute} weights", form.item * shape.parameters))
    return (*lines, *passes)


def reference_bytes(shape: ModelShape, settings: TrainerSettings) -> float:
    """Returns weights of a reference of this shape in a scorer, on its device."""
    return (BFLOAT16 if settings.compute == "bfloat16" else FLOAT32) * shape.parameters


def _critic_bytes(shape: ModelShape, form: TrainerForm) -> float:
    body = shape.parameters - (0 if shape.tied else shape.embedding_parameters)
    trained = body if form.lora_rank is None else trained_parameters(shape, form)
    is_apart = form.item != FLOAT32 or form.offload or form.lora_rank is not None
    # State, and the gradients that each worker holds during the policy's pass. The head has one
    # row.
    per_parameter = (0 if form.offload else STATE_BYTES) + form.workers * form.item
    return per_parameter * trained + (form.item * body if is_apart else 0)


def own_parameters(shape: ModelShape, form: TrainerForm) -> int:
    """Returns the parameters trained by the fullest rank; an upper bound for an adapter."""
    if form.lora_rank is not None:
        # All factors are divided like A, which has only as many rows as the adapter's rank.
        rows = -(-form.lora_rank // form.ranks)
        return trained_parameters(shape, form) * rows // form.lora_rank
    return _held_parameters(shape, form.ranks)


def _held_parameters(shape: ModelShape, ranks: int) -> int:
    if ranks == 1:
        return shape.parameters
    # FSDP2 gives a rank whole rows (`rows_per_rank` in `trainer/rank_plan.py`).
    return sum(count * -(-rows // ranks) * size for count, rows, size in shape.tensors)


def _gathered_lines(shape: ModelShape, form: TrainerForm, passes: float) -> list[MemoryLine]:
    """Returns what FSDP2 holds beside a rank's slices (`shard_model`): layers, and one float32
    group of embedding, final norm and head.
    """
    if form.lora_rank is not None:
        # A frozen base is gathered in the type of the arithmetic; only factors have gradients.
        factors = shape.adapter_parameters(form.lora_rank) / shape.layers
        layers = PREFETCHED_GROUPS * form.item * (shape.layer_parameters + factors)
        return [
            MemoryLine("gathered embedding and head", form.item * shape.root_parameters),
            MemoryLine("gathered layers", layers),
            MemoryLine("gradients of one layer, to reduce", (form.item + FLOAT32) * factors),
        ]
    layer, root, head = shape.layer_parameters, shape.root_parameters, shape.embedding_parameters
    lines = [
        MemoryLine("gathered layers", PREFETCHED_GROUPS * form.item * layer),
        MemoryLine("gradients of one layer, to reduce", (form.item + FLOAT32) * layer),
        MemoryLine("gradient of the head", FLOAT32 * head),
    ]
    # The peak is within the layers' backward pass, when only the head of the group has a gradient,
    # or at its end, when activations and layers are gone and the group's gradients are copied to
    # reduce them.
    beyond = max(0.0, 2 * FLOAT32 * root - total(lines) - passes)
    return [
        MemoryLine("gathered embedding and head", FLOAT32 * root),
        *lines,
        MemoryLine("reducing embedding and head, beyond them", beyond),
    ]


def _pass_lines(shape: ModelShape, form: TrainerForm) -> list[MemoryLine]:
    activations = kept_bytes(shape, form)
    head = _head_bytes(shape, form)
    gradients = 0.0
    if form.ranks == 1:
        gradients = form.item * trained_parameters(shape, form)
        if form.lora_rank is None and shape.tied:
            # The embedding's own gradient, before it is added to that of the head.
            gradients += form.item * shape.embedding_parameters
    # Activations are freed while gradients are made: the peak is at the begin or the end of the
    # backward pass.
    return [
        MemoryLine("activations of a micro-batch", form.workers * activations),
        MemoryLine("head and logits", form.workers * head),
        MemoryLine("gradients beyond them", form.workers * max(0.0, gradients - activations)),
    ]


def kept_bytes(shape: ModelShape, form: TrainerForm) -> float:
    """Returns the bytes that a micro-batch's forward pass keeps for the backward pass."""
    tokens, d = form.micro_batch_tokens, shape.hidden
    if form.is_packed and shape.experts is None:
        rotations = FLOAT32 * tokens * (shape.query_size + shape.kv_size)
        if form.recompute:
            inputs = shape.layers * FLOAT32 * tokens * d
            return inputs + _packed_layer_bytes(shape, tokens) + rotations
        return shape.layers * _packed_layer_bytes(shape, tokens) + rotations
    layer = tokens * general_layer_numbers(shape, form.item)
    if not form.recompute:
        return shape.layers * layer
    return form.item * tokens * d * shape.layers + layer


def _packed_layer_bytes(shape: ModelShape, tokens: int) -> float:
    d, q, kv, f = shape.hidden, shape.query_size, shape.kv_size, shape.intermediate
    # Two norms, rotated queries and keys (threefold if heads have norms), values, attention's
    # output twice, gate and up with their SiLU and product.
    numbers = 2 * d + (q + kv) * (3 if shape.has_head_norms else 1) + kv + 2 * q + 4 * f
    # Copies of the matrices with the norms' gains; those of queries, keys, gate and up also joined.
    folded = 2 * d * (q + kv) + d * kv + 2 * (2 * d * f)
    return FLOAT32 * (tokens * numbers + folded)


def general_layer_numbers(shape: ModelShape, item: int) -> float:
    """Returns bytes per token that a layer of transformers keeps (Korthikanti et al., arXiv
    2205.05198, for this kind of layer).
    """
    d, q = shape.hidden, shape.query_size
    # Each norm's float32 input and two results.
    norms = 2 * (FLOAT32 + 2 * item) * d
    if shape.has_head_norms:
        norms += (FLOAT32 + item) * (q + shape.kv_size)
    # Queries, keys and values as all heads attend to them, attention's output.
    attention = item * 4 * q + FLOAT32 * shape.heads
    inputs = 0 if shape.experts is None else shape.experts.used * d  # each expert's own rows
    # The feed-forward part's gate, its SiLU, up and their product.
    return norms + attention + item * (4 * shape.feed_forward + inputs)


def _head_bytes(shape: ModelShape, form: TrainerForm) -> float:
    tokens = form.micro_batch_tokens
    logits = min(LOGITS_SLICE, tokens * shape.vocabulary) * FLOAT32 * LOGITS_COPIES
    states = 2 * FLOAT32 * tokens * shape.hidden
    # With several ranks the gathered head is float32 already, unless it is frozen.
    has_own_head = form.ranks == 1 or form.lora_rank is not None
    copies = 2 if has_own_head and form.lora_rank is None else int(has_own_head)
    return logits + states + copies * FLOAT32 * shape.embedding_parameters


def trainer_host_lines(
    shape: ModelShape, form: TrainerForm, published_item: int, on_cpu: bool = False
) -> tuple[MemoryLine, ...]:
    """A rank's host memory, without its libraries; `published_item` is the bytes of a published
    number. On the CPU (`on_cpu`) `trainer_lines` come on top.
    """
    own_trained, trained = own_parameters(shape, form), trained_parameters(shape, form)
    published = float(trained)
    if form.ranks > 1 and form.lora_rank is None:  # each rank has the whole adapter
        # A published tensor is whole at its owner (`owners` in `trainer/rank_plan.py`). The fullest
        # rank has at most the sum of mean and largest tensor; it is counted with the larger of
        # both.
        published = max(trained / form.ranks, max(rows * size for _, rows, size in shape.tensors))
    is_lent = (on_cpu or form.offload) and form.saved * trained > LENT_BYTES_MIN
    critic = own_trained if form.critic else 0
    saved = form.saved * own_trained + CHECKPOINT_BYTES * critic
    state = saved + FLOAT32 * (own_trained + critic) if form.offload else 0.0
    is_base_here = form.offload and form.lora_rank is not None and form.ranks > 1
    base = form.item * _held_parameters(shape, form.ranks) if is_base_here else 0.0
    return (
        MemoryLine(STATE, state),
        MemoryLine("frozen base", base),
        MemoryLine("copies being published", COPIES * published_item * published),
        MemoryLine("checkpoint being written", 0.0 if is_lent else saved),
        MemoryLine("one file of it", min(CHECKPOINT_FILE_BYTES, saved)),
    )


def torch_engine_lines(
    shape: ModelShape, slots: int, context: int, item: int, published_item: int = 0
) -> tuple[MemoryLine, ...]:
    """Returns the torch engine lines of the embedded engine, whose layers compute with numbers of
    `item` bytes; on the CPU with the rollout's version, of `published_item` bytes per parameter (on
    a GPU 0).
    """
    published = published_item * shape.parameters
    layers = shape.layers * shape.layer_parameters
    head = FLOAT32 * shape.embedding_parameters  # float32 whatever the layers are
    kv = item * shape.kv_numbers
    passes = PREFILL_TOKENS * (
        2 * kv + item * (2 * shape.feed_forward + 3 * shape.hidden + 2 * shape.query_size)
    )
    return (
        MemoryLine(WEIGHTS, item * (layers + shape.embedding_parameters) + head),
        MemoryLine("KV cache", (slots + 1) * (context + SPARE_COLUMNS) * kv),
        MemoryLine("prefix cache", slots * context / PREFIX_SHARE * kv),
        MemoryLine(
            "prefill and logits", passes + LOGITS_COPIES * FLOAT32 * slots * shape.vocabulary
        ),
        MemoryLine(
            # A larger version is in a file (`storage/weights/mapped.py`).
            "version held by the rollout",
            published if published <= MEMORY_FILE_BYTES else 0.0,
        ),
        MemoryLine("an update's largest tensor", UPDATE_COPIES * head),
    )
