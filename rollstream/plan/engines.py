"""Sizes the engine of a rollout. It fits if its KV cache holds `SEQUENCES_MIN` sequences of full
context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollstream.plan import rates
from rollstream.plan.rates import TrainerLink
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import MemoryLine, total
from rollstream.run.sizes.devices import CARDS_PER_MACHINE, GB, Accelerator
from rollstream.run.sizes.shapes import ModelShape
from rollstream.run.sizes.vllm_memory import vllm_lines

ENGINE_SHARE = 0.9
"""Of an engine alone on its cards: the default of `rollouts.vllm.memory_share`, as of vLLM's
`gpu_memory_utilization`.
"""
MEAN_SHARE = 4
"""A mean trajectory is assumed to have a quarter of the context. A choice for lengths with a long
tail: their 99th percentile is about 10 medians (Laminar §2).
"""
GROUPS, SAMPLES = 128, 8
"""Default groups of a step, and trajectories of a group: 1024, as in PipelineRL (arXiv 2509.19128).
"""
FP8 = 1.0
"""Bytes under vLLM's `quantization = "fp8"`."""
ADAPTER_RANK = 16
"""Proposed where all parameters do not fit. A choice: vLLM's default `max_lora_rank`."""
SEQUENCES_MIN = 8
"""Longest sequences that an engine's KV cache must hold. A choice: a decode step reads all weights,
whatever the number of its rows, so with fewer rows a token would cost more than an eighth of such a
read.
"""
SLOTS_MAX = 256
"""A choice: vLLM's default `max_num_seqs` on cards below 70 GiB (`get_batch_defaults` in vLLM
0.32's `engine/arg_utils.py`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A model, `cards` equal cards, and sequences of up to `context` tokens. Rates are in Gbit/s:
    machine to store, machine to machine. `lora_rank` 0 trains all parameters; with `fp8` rollouts
    serve 8-bit weights. The one training card holds a `reference` or a `critic` too.
    """

    shape: ModelShape
    card: Accelerator
    cards: int
    context: int
    store_gbps: float
    network_gbps: float
    lora_rank: int = 0
    fp8: bool = False
    groups: int = GROUPS
    reference: bool = False
    critic: bool = False

    @property
    def trajectories(self) -> int:
        return self.groups * SAMPLES

    @property
    def step_tokens(self) -> float:
        """Counts prompts, too; both sides compute all of them."""
        return self.trajectories * self.context / MEAN_SHARE

    @property
    def machines(self) -> int:
        return -(-self.cards // CARDS_PER_MACHINE)

    def link(self, ranks: int) -> TrainerLink:
        return rates.trainer_link(self.card, ranks, self.network_gbps)

    @property
    def weight_item(self) -> float:
        """Bytes of a weight in a rollout."""
        return FP8 if self.fp8 else sums.BFLOAT16


def usable(card: Accelerator) -> float:
    """Returns bytes of a card that one training process can fill."""
    return card.memory * (1 - sums.FRAGMENTED) - sums.CONTEXT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """Takes `memory_share` of each of its `tensor_parallel` cards, caches `kv_tokens` tokens and
    decodes `slots` sequences together. With `has_evaluation` an evaluation's engine fits on the
    same cards. `reason` states why the engine is not vLLM.
    """

    name: Literal["vllm", "torch"] = "vllm"
    tensor_parallel: int = 1
    memory_share: float
    kv_tokens: int
    slots: int
    has_evaluation: bool = False
    reason: str = ""

    @property
    def is_vllm(self) -> bool:
        return not self.reason


def own_engine(request: PlanRequest, cards: int) -> EngineSize | None:
    """Returns the engine on up to `cards` cards of its own, all of one machine: vLLM on the fewest
    cards on which it fits, else the embedded engine on one card if an adapter is trained.
    """
    for tensor_parallel in _engine_cards(request, cards):
        tokens = vllm_tokens(request, tensor_parallel, ENGINE_SHARE)
        if tokens < SEQUENCES_MIN * request.context:
            continue
        # Where half the share holds enough sequences, the other half is left to an evaluation.
        half = vllm_tokens(request, tensor_parallel, ENGINE_SHARE / 2)
        if half >= SLOTS_MAX // 2 * request.context:
            return _vllm(request, tensor_parallel, ENGINE_SHARE / 2, True)
        return _vllm(request, tensor_parallel, ENGINE_SHARE, False)
    return _embedded(request, ENGINE_SHARE, usable(request.card))


def shared_engine(request: PlanRequest, rest: float, evaluated: bool) -> EngineSize | None:
    """Returns the engine on the trainer's card, in the `rest` bytes that the trainer leaves. With
    `evaluated`, vLLM leaves half of them to an evaluation.
    """
    share = int(100 * rest / request.card.memory / (1 + evaluated)) / 100
    if vllm_tokens(request, 1, share) >= SEQUENCES_MIN * request.context:
        return _vllm(request, 1, share, evaluated)
    return None if evaluated else _embedded(request, share, rest)


def _engine_cards(request: PlanRequest, cards: int) -> Sequence[int]:
    cards_max = min(cards, CARDS_PER_MACHINE)
    # Powers of two that divide the attention heads.
    return [n for n in (1, 2, 4, 8) if n <= cards_max and request.shape.heads % n == 0]


def vllm_tokens(request: PlanRequest, tensor_parallel: int, share: float) -> int:
    """Returns tokens that vLLM caches in this share of its cards' memory."""
    free = request.card.memory * share - total(_lines(request, tensor_parallel))
    return kv_tokens(request.shape, tensor_parallel, free)


def _lines(request: PlanRequest, tensor_parallel: int, slots: int = SLOTS_MAX) -> list[MemoryLine]:
    r = request
    return [*vllm_lines(r.shape, tensor_parallel, slots, r.weight_item, r.lora_rank)]


def _vllm(request: PlanRequest, tensor_parallel: int, share: float, evaluated: bool) -> EngineSize:
    tokens = vllm_tokens(request, tensor_parallel, share)
    return EngineSize(
        tensor_parallel=tensor_parallel,
        memory_share=share,
        kv_tokens=tokens,
        # The cache is paged, and running sequences are assumed to fill half of the context on
        # average. A choice: more than the quarter of a mean trajectory (`MEAN_SHARE`).
        slots=max(SEQUENCES_MIN, min(SLOTS_MAX, 2 * tokens // request.context)),
        has_evaluation=evaluated,
    )


def _embedded(request: PlanRequest, share: float, memory: float) -> EngineSize | None:
    if not request.lora_rank:
        return None
    # Each slot has the cache of a longest sequence.
    for slots in range(SLOTS_MAX, SEQUENCES_MIN - 1, -SEQUENCES_MIN):
        lines = sums.torch_engine_lines(request.shape, slots, request.context, sums.BFLOAT16)
        if total(lines) <= memory:
            cached = vllm_tokens(request, 1, share) // request.context
            taken = total([line for line in _lines(request, 1) if line.what != sums.WEIGHTS])
            reason = (
                f"vLLM would cache {cached} longest sequences here and needs {SEQUENCES_MIN}: "
                f"it takes {taken / GB:.1f} GB beside weights and cache"
            )
            return EngineSize(
                name="torch",
                memory_share=0.0,
                kv_tokens=slots * request.context,
                slots=slots,
                reason=reason,
            )
    return None


def engine_lines(request: PlanRequest, engine: EngineSize) -> tuple[MemoryLine, ...]:
    """Returns memory of one card, line by line."""
    if not engine.is_vllm:
        return sums.torch_engine_lines(request.shape, engine.slots, request.context, sums.BFLOAT16)
    lines = _lines(request, engine.tensor_parallel, engine.slots)
    cache = request.card.memory * engine.memory_share - total(lines)
    return (*lines, MemoryLine("KV cache", cache))


def least_lines(request: PlanRequest, cards: int) -> tuple[int, tuple[MemoryLine, ...]]:
    """A rollout's least need, for messages: the most cards of one vLLM engine, and the memory of
    one of them under vLLM, or under the embedded engine if an adapter is trained and it needs less.
    """
    shape, engine_cards = request.shape, _engine_cards(request, cards)[-1]
    cache = SEQUENCES_MIN * request.context * sums.BFLOAT16 * shape.kv_numbers
    cached = MemoryLine(
        f"KV cache of {SEQUENCES_MIN} sequences", cache / min(engine_cards, shape.kv_heads)
    )
    lines = (*_lines(request, engine_cards), cached)
    if not request.lora_rank:
        return engine_cards, lines
    embedded = sums.torch_engine_lines(shape, SEQUENCES_MIN, request.context, sums.BFLOAT16)
    return engine_cards, min(lines, embedded, key=total)


def kv_tokens(shape: ModelShape, tensor_parallel: int, free: float) -> int:
    """Returns tokens that `free` bytes on each card can cache."""
    # A card caches whole heads: with more cards than `kv_heads` each head is cached more than once.
    split = min(tensor_parallel, shape.kv_heads)
    return max(0, int(free * split / (sums.BFLOAT16 * shape.kv_numbers)))
