"""Sizes the engine of a plan: vLLM or the embedded engine, its cards, and its share of their
memory. `PlanRequest` is the input of a plan, `EngineSize` the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollstream.sizes import arithmetic as sums, rates
from rollstream.sizes.arithmetic import MemoryLine, total
from rollstream.sizes.devices import CARDS_PER_MACHINE, GB, Accelerator
from rollstream.sizes.rates import TrainerLink
from rollstream.sizes.shapes import ModelShape

ENGINE_SHARE = 0.9
"""Share of its cards that an engine takes where it is alone: the default of
`rollouts.vllm.memory_share`, which is that of vLLM's `gpu_memory_utilization`.
"""
MEAN_SHARE = 4
"""A mean trajectory has a quarter of the context. A choice for a long tail: p99 is about 10 medians
(Laminar §2).
"""
GROUPS, SAMPLES = 128, 8
"""Groups of a step where none are asked for, and trajectories of each: 1024 as PipelineRL has
(arXiv 2509.19128).
"""
FP8 = 1.0
"""Bytes of a weight in vLLM's `quantization = "fp8"`."""
ADAPTER_RANK = 16
"""Rank of an adapter where none is asked for. A choice: vLLM's default `max_lora_rank`."""
SEQUENCES_MIN = 8
"""Longest sequences that a KV cache must hold. A choice: a step of one row reads all weights, so
fewer rows would make a token cost more than an eighth of that.
"""
SLOTS_MAX = 256
"""Most sequences of an engine. A choice: vLLM's default `max_num_seqs` on cards below 70 GiB
(`get_batch_defaults` in vLLM 0.32's `engine/arg_utils.py`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The input of a plan: a model, its cards, and sequences of up to `context` tokens.
    `lora_rank` 0 trains all parameters; with `fp8` rollouts serve 8-bit weights.
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

    @property
    def trajectories(self) -> int:
        """Trajectories of a step."""
        return self.groups * SAMPLES

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, prompts included; rollouts and trainer compute all of them."""
        return self.trajectories * self.context / MEAN_SHARE

    @property
    def machines(self) -> int:
        return -(-self.cards // CARDS_PER_MACHINE)

    def link(self, ranks: int) -> TrainerLink:
        """The link between `ranks` training cards."""
        return rates.trainer_link(self.card, ranks, self.network_gbps)

    @property
    def weight_item(self) -> float:
        """Bytes of a weight in a rollout."""
        return FP8 if self.fp8 else sums.BFLOAT16


def usable(card: Accelerator) -> float:
    """Bytes of a card that one training process can fill."""
    return card.memory * (1 - sums.FRAGMENTED) - sums.CONTEXT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """One engine: its cards, its share of their memory, the tokens that it caches, the sequences
    that it decodes together, and whether an evaluation fits beside it. `reason` states why the
    engine is not vLLM.
    """

    name: Literal["vllm", "torch"] = "vllm"
    tensor_parallel: int = 1
    memory_share: float
    kv_tokens: int
    slots: int
    has_evaluation: bool = False
    reason: str = ""


def own_engine(request: PlanRequest, cards: int) -> EngineSize | None:
    """Returns the engine on up to `cards` cards of its own: vLLM on the fewest cards that hold
    `SEQUENCES_MIN` longest sequences, else the embedded engine if the model has an adapter and fits
    one card, else None. An engine stays on one machine.
    """
    for tensor_parallel in _engine_cards(request, cards):
        tokens = vllm_tokens(request, tensor_parallel, ENGINE_SHARE)
        if tokens < SEQUENCES_MIN * request.context:
            continue
        half = vllm_tokens(request, tensor_parallel, ENGINE_SHARE / 2)
        if half >= SLOTS_MAX // 2 * request.context:
            return _vllm(request, tensor_parallel, ENGINE_SHARE / 2, True)
        return _vllm(request, tensor_parallel, ENGINE_SHARE, False)
    return _embedded(request, ENGINE_SHARE, usable(request.card))


def shared_engine(request: PlanRequest, rest: float, evaluated: bool) -> EngineSize | None:
    """Returns the engine on the trainer's card, in `rest` bytes of its memory; None if neither
    engine fits. With `evaluated`, an evaluation beside it gets the same share.
    """
    share = int(100 * rest / request.card.memory / (1 + evaluated)) / 100
    if vllm_tokens(request, 1, share) >= SEQUENCES_MIN * request.context:
        return _vllm(request, 1, share, evaluated)
    return None if evaluated else _embedded(request, share, rest)


def _engine_cards(request: PlanRequest, cards: int) -> Sequence[int]:
    """Returns the numbers of cards that one vLLM engine may have, ascending."""
    most = min(cards, CARDS_PER_MACHINE)
    return [n for n in (1, 2, 4, 8) if n <= most and request.shape.heads % n == 0]


def vllm_tokens(request: PlanRequest, tensor_parallel: int, share: float) -> int:
    """Tokens that a vLLM engine caches in this share of its cards."""
    free = request.card.memory * share - total(_lines(request, tensor_parallel))
    return sums.kv_tokens(request.shape, tensor_parallel, free)


def _lines(request: PlanRequest, tensor_parallel: int, slots: int = SLOTS_MAX) -> list[MemoryLine]:
    r = request
    return [*sums.vllm_lines(r.shape, tensor_parallel, slots, r.weight_item, r.lora_rank)]


def _vllm(request: PlanRequest, tensor_parallel: int, share: float, evaluated: bool) -> EngineSize:
    """Returns a vLLM engine. Its cache is paged, and sequences have half of the context on average,
    so it decodes twice as many sequences as its cache holds longest ones.
    """
    tokens = vllm_tokens(request, tensor_parallel, share)
    return EngineSize(
        tensor_parallel=tensor_parallel,
        memory_share=share,
        kv_tokens=tokens,
        slots=max(SEQUENCES_MIN, min(SLOTS_MAX, 2 * tokens // request.context)),
        has_evaluation=evaluated,
    )


def _embedded(request: PlanRequest, share: float, memory: float) -> EngineSize | None:
    """Returns the embedded engine with the most slots that fit `memory` bytes, each with the cache
    of a longest sequence; None without an adapter or if too few fit. Only `reason` uses `share`,
    the memory share that is too small for vLLM.
    """
    if not request.lora_rank:
        return None
    for slots in range(SLOTS_MAX, SEQUENCES_MIN - 1, -SEQUENCES_MIN):
        lines = sums.torch_engine_lines(request.shape, slots, request.context, sums.BFLOAT16)
        if total(lines) <= memory:
            cached = vllm_tokens(request, 1, share) // request.context
            taken = total([one for one in _lines(request, 1) if one.what != sums.WEIGHTS])
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
    """Returns the memory lines of one card of the engine, its cache included."""
    if engine.name == "torch":
        return sums.torch_engine_lines(request.shape, engine.slots, request.context, sums.BFLOAT16)
    lines = _lines(request, engine.tensor_parallel, engine.slots)
    cache = request.card.memory * engine.memory_share - total(lines)
    return (*lines, MemoryLine("KV cache", cache))


def least_lines(request: PlanRequest, cards: int) -> tuple[int, tuple[MemoryLine, ...]]:
    """Returns the most cards that vLLM may have, and one card's memory lines of the engine that
    needs the least there, with a cache of `SEQUENCES_MIN` longest sequences.
    """
    shape, own = request.shape, _engine_cards(request, cards)[-1]
    cache = SEQUENCES_MIN * request.context * sums.BFLOAT16 * shape.kv_numbers
    cached = MemoryLine(f"KV cache of {SEQUENCES_MIN} sequences", cache / min(own, shape.kv_heads))
    lines = (*_lines(request, own), cached)
    if not request.lora_rank:
        return own, lines
    embedded = sums.torch_engine_lines(shape, SEQUENCES_MIN, request.context, sums.BFLOAT16)
    return own, min(lines, embedded, key=total)
