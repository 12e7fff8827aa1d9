"""Chooses how a model is trained on some cards, by arithmetic alone: which cards train and which
generate, the largest micro-batch, the KV cache, and, where it does not fit, the cheapest change
that does.

Cheapest means: first what costs no card (an adapter in place of all parameters, 8-bit weights in
the rollouts), then more cards of the same kind. Memory bounds a layout from below; among those that
fit, the one whose slower side has the highest rate wins, because a step lasts as long as that side
needs for its tokens. Without known speeds it is the one with equal halves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rollstream.sizes import arithmetic as sums, rates
from rollstream.sizes.arithmetic import MemoryLine, TrainerForm, total
from rollstream.sizes.devices import CARDS_PER_MACHINE, Accelerator
from rollstream.sizes.rates import TrainerLink
from rollstream.sizes.shapes import ModelShape

ENGINE_SHARE = 0.9
"""Share of its cards that an engine takes where it is alone (`rollouts.vllm.memory_share`)."""
SEQUENCES_MIN = 8
"""Longest sequences that a KV cache must hold: below it decoding is bound by the weights."""
SEQUENCES_WANTED = 64
"""Longest sequences up to which a shared card's cache comes before anything else."""
SLOTS_MAX = 256
MICRO_BATCH_TOKENS_MAX = 32_768
"""Larger micro-batches gain nothing, the products of a pass are large enough long before, unless
collectives take longer than them.
"""
MEAN_SHARE = 4
"""A mean trajectory has a quarter of the context: lengths have a long tail (p99 about 10 medians,
Laminar §2).
"""
GROUPS, SAMPLES = 128, 8
"""Groups of a step where none are asked for, and trajectories of each: 1024 as PipelineRL has."""
LAG_MAX = 4  # steps that are generated ahead: the default of `dispatch.max_lag`
FP8 = 1.0  # bytes of a weight
ADAPTER_RANK = 16  # where none is asked for
CARDS_MAX = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The question: this model on these cards, with sequences of up to `context` tokens.
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
        """Tokens of a step, which both sides compute; rollouts prefill those of prompts."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLayout:
    """A division of the cards that fits: `trainer_cards` ranks, and `engines` engines of
    `tensor_parallel` cards each. With `is_shared` all are the same card.
    """

    form: TrainerForm
    trainer_cards: int
    engines: int
    tensor_parallel: int
    memory_share: float
    kv_tokens: int
    slots: int
    has_evaluation: bool
    is_shared: bool = False
    micro_batch_max: int = 0
    train_tokens_per_s: float = 0.0
    rollout_tokens_per_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The rate of the slower side; 0 where speeds are unknown."""
        return min(self.train_tokens_per_s, self.rollout_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A role that does not fit a card: what it needs at least, and what it has."""

    role: str
    lines: tuple[MemoryLine, ...]
    available: float

    @property
    def needed(self) -> float:
        return total(self.lines)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The answer. Without a `layout` the request does not fit: `shortages` names why, and `change`,
    if there is one, is the cheapest request that does, with its own layout.
    """

    request: PlanRequest
    layout: CardLayout | None
    shortages: tuple[Shortage, ...] = ()
    change: "RunPlan | None" = None

    @property
    def proposed(self) -> "RunPlan | None":
        """The plan that fits: this one, or that of the change."""
        return self if self.layout is not None else self.change


def plan_run(request: PlanRequest) -> RunPlan:
    """The best layout of the request, or its shortages with the cheapest change."""
    layout = best_layout(request)
    if layout is not None:
        return RunPlan(request, layout)
    for other in _changes(request):
        layout = best_layout(other)
        if layout is not None:
            return RunPlan(request, None, shortages_of(request), RunPlan(other, layout))
    return RunPlan(request, None, shortages_of(request))


def _changes(request: PlanRequest) -> Iterator[PlanRequest]:
    """Other requests for the same model, by ascending cost."""
    if not request.lora_rank:
        yield replace(request, lora_rank=ADAPTER_RANK)
        yield replace(request, fp8=True)
    cards = request.cards
    while cards < CARDS_MAX:
        cards = cards + 1 if cards < CARDS_PER_MACHINE else 2 * cards
        yield replace(request, cards=cards)
        if not request.lora_rank:
            yield replace(request, cards=cards, fp8=True)


def best_layout(request: PlanRequest) -> CardLayout | None:
    """The layout that fits with the highest rate, None if none fits."""
    if request.cards == 1:
        return _shared_layout(request)
    found = [
        layout
        for cards in _trainer_cards(request)
        for recompute in (False, True)
        if (layout := _layout(request, cards, recompute)) is not None
    ]
    half = request.cards / 2

    def rank(layout: CardLayout) -> tuple[float, float, float, bool]:
        balance = -abs(layout.trainer_cards - half)
        generated = layout.rollout_tokens_per_s
        return layout.tokens_per_s, generated, balance, not layout.form.recompute

    return max(found, key=rank, default=None)


def _trainer_cards(request: PlanRequest) -> Sequence[int]:
    """Numbers of cards that may train: any on one machine, else whole machines. An adapter is
    trained on one card where that holds the base.
    """
    cards = request.cards
    if request.lora_rank:
        alone = trainer_form(request, 1, recompute=True)
        if total(sums.trainer_lines(request.shape, alone)) <= usable(request.card):
            return range(1, 2)
    if cards <= CARDS_PER_MACHINE:
        return range(1, cards)
    return range(CARDS_PER_MACHINE, cards, CARDS_PER_MACHINE)


def usable(card: Accelerator) -> float:
    """Bytes of a card that one training process can fill."""
    return card.memory * (1 - sums.FRAGMENTED) - sums.CONTEXT_BYTES


def _layout(request: PlanRequest, trainer_cards: int, recompute: bool) -> CardLayout | None:
    """The layout with this many training cards; None if a role does not fit."""
    form = _largest_form(request, trainer_form(request, trainer_cards, recompute))
    engine = None if form is None else _engine(request, request.cards - trainer_cards)
    if form is None or engine is None:
        return None
    layout = CardLayout(
        form=_proposed_form(request, form),
        trainer_cards=trainer_cards,
        engines=(request.cards - trainer_cards) // engine.tensor_parallel,
        tensor_parallel=engine.tensor_parallel,
        memory_share=engine.memory_share,
        kv_tokens=engine.kv_tokens,
        slots=_slots(request, engine.kv_tokens),
        has_evaluation=engine.has_evaluation,
        micro_batch_max=form.micro_batch_tokens,
    )
    return _rated(request, layout)


def _proposed_form(request: PlanRequest, form: TrainerForm) -> TrainerForm:
    """The form with the smallest micro-batch that needs no more rounds than the largest one, as far
    as a larger one gains something; it holds one longest sequence.
    """
    most = min(form.micro_batch_tokens, MICRO_BATCH_TOKENS_MAX)
    if request.card.flops:
        at_most = replace(form, micro_batch_tokens=most)
        compute_s, collectives_s = rates.round_s(request.shape, at_most, request.link(form.ranks))
        most = form.micro_batch_tokens if collectives_s > compute_s else most
    rounds = ceil(request.step_tokens / (form.ranks * most))
    each = ceil(request.step_tokens / (form.ranks * rounds * request.context)) * request.context
    return replace(form, micro_batch_tokens=max(request.context, min(each, most)))


def _largest_form(request: PlanRequest, form: TrainerForm) -> TrainerForm | None:
    """The form with the largest micro-batch that fits a card, None if no sequence does."""
    tokens = sums.micro_batch_max(request.shape, form, usable(request.card), request.context)
    return replace(form, micro_batch_tokens=tokens) if tokens else None


def trainer_form(request: PlanRequest, ranks: int, recompute: bool) -> TrainerForm:
    """A form with a micro-batch of one longest sequence."""
    return TrainerForm(
        micro_batch_tokens=request.context,
        ranks=ranks,
        recompute=recompute,
        lora_rank=request.lora_rank or None,
    )


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Cards of one engine, its share of them, the tokens that it caches, and whether an evaluation
    fits beside it.
    """

    tensor_parallel: int
    memory_share: float
    kv_tokens: int
    has_evaluation: bool


def _engine(request: PlanRequest, cards: int) -> EngineSize | None:
    """The engine with the fewest cards that hold `SEQUENCES_MIN` longest sequences. An engine stays
    on one machine. An adapter is planned with the embedded engine, on one card.
    """
    if request.lora_rank:
        return _embedded_engine(request, usable(request.card))
    for tensor_parallel in (1, 2, 4, 8):
        if tensor_parallel > cards or request.shape.heads % tensor_parallel:
            continue
        tokens = engine_tokens(request, tensor_parallel, ENGINE_SHARE)
        if tokens < SEQUENCES_MIN * request.context:
            continue
        half = engine_tokens(request, tensor_parallel, ENGINE_SHARE / 2)
        if half >= SLOTS_MAX // 2 * request.context:
            return EngineSize(tensor_parallel, ENGINE_SHARE / 2, half, True)
        return EngineSize(tensor_parallel, ENGINE_SHARE, tokens, False)
    return None


def _embedded_engine(request: PlanRequest, memory: float) -> EngineSize | None:
    """The embedded engine with the most slots that fit `memory`, each with its whole cache."""
    for slots in range(SLOTS_MAX, SEQUENCES_MIN - 1, -SEQUENCES_MIN):
        lines = sums.torch_engine_lines(request.shape, slots, request.context, sums.BFLOAT16)
        if total(lines) <= memory:
            return EngineSize(1, 0.0, slots * request.context, has_evaluation=False)
    return None


def engine_tokens(request: PlanRequest, tensor_parallel: int, share: float) -> int:
    """Tokens that an engine caches in this share of its cards."""
    lines = sums.vllm_lines(request.shape, tensor_parallel, SLOTS_MAX, request.weight_item)
    free = request.card.memory * share - total(lines)
    return sums.kv_tokens(request.shape, tensor_parallel, free)


def _shared_layout(request: PlanRequest) -> CardLayout | None:
    """Trainer and rollout on one card, and the evaluation where it fits too. The trainer gets what
    its micro-batch needs, the engines the rest; the cache is filled up to `SEQUENCES_WANTED` first.
    """
    found = [
        layout
        for evaluated in (True, False)
        for recompute in (False, True)
        for sequences in (4, 1)
        if (layout := _shared_form(request, evaluated, recompute, sequences)) is not None
    ]

    def rank(layout: CardLayout) -> tuple[int, bool, float, bool]:
        cached = min(layout.kv_tokens, SEQUENCES_WANTED * request.context)
        return cached, layout.has_evaluation, layout.tokens_per_s, not layout.form.recompute

    return max(found, key=rank, default=None)


def _shared_form(
    request: PlanRequest, evaluated: bool, recompute: bool, sequences: int
) -> CardLayout | None:
    """The layout of one card with micro-batches of this many longest sequences."""
    engines, tokens = 1 + evaluated, sequences * request.context
    form = replace(trainer_form(request, 1, recompute), micro_batch_tokens=tokens)
    trainer = total(sums.trainer_lines(request.shape, form)) / (1 - sums.FRAGMENTED)
    rest = request.card.memory - trainer - sums.CONTEXT_BYTES * (1 + engines)
    share = int(100 * rest / request.card.memory / engines) / 100
    engine = EngineSize(1, share, engine_tokens(request, 1, share), evaluated)
    if request.lora_rank:
        engine = None if evaluated else _embedded_engine(request, rest)
    if engine is None or engine.kv_tokens < SEQUENCES_MIN * request.context:
        return None
    layout = CardLayout(
        form=form,
        trainer_cards=1,
        engines=1,
        tensor_parallel=1,
        memory_share=engine.memory_share,
        kv_tokens=engine.kv_tokens,
        slots=_slots(request, engine.kv_tokens),
        has_evaluation=evaluated,
        is_shared=True,
        micro_batch_max=tokens,
    )
    return _rated(request, layout)


def _rated(request: PlanRequest, layout: CardLayout) -> CardLayout:
    """The layout with its rates. On a shared card each side has half of its time."""
    share = 0.5 if layout.is_shared else 1.0
    form, card = layout.form, request.card
    train = rates.train_tokens_per_s(
        request.shape, form, request.link(form.ranks), request.step_tokens
    )
    rows = min(layout.slots, max(1, 2 * layout.kv_tokens // request.context))
    rows = min(rows, (1 + LAG_MAX) * request.trajectories / layout.engines)
    decode = rates.decode_tokens_per_s(
        request.shape, card, layout.tensor_parallel, rows, request.context, request.weight_item
    )
    return replace(
        layout,
        train_tokens_per_s=share * train,
        rollout_tokens_per_s=share * layout.engines * decode,
    )


def _slots(request: PlanRequest, tokens: int) -> int:
    """Sequences that decode together: they have half of the context on average. The embedded
    engine keeps room for the whole context of each.
    """
    sequences = (1 if request.lora_rank else 2) * tokens // request.context
    return max(SEQUENCES_MIN, min(SLOTS_MAX, sequences))


def shortages_of(request: PlanRequest) -> tuple[Shortage, ...]:
    """The roles that do not fit with as many cards as they can get."""
    shape, card = request.shape, request.card
    alone = request.cards == 1
    ranks = 1 if alone else _trainer_cards(request)[-1]
    form = trainer_form(request, ranks, recompute=True)
    found: list[Shortage] = []
    trainer = sums.trainer_lines(shape, form)
    if total(trainer) > usable(card):
        found.append(Shortage("trainer", trainer, usable(card)))
    most = min(CARDS_PER_MACHINE, 1 if alone else request.cards - 1)
    cards = max(n for n in (1, 2, 4, 8) if n <= most and shape.heads % n == 0)
    cache = SEQUENCES_MIN * request.context * sums.BFLOAT16 * shape.kv_numbers
    cards = 1 if request.lora_rank else cards
    engine = (
        *sums.vllm_lines(shape, cards, SLOTS_MAX, request.weight_item),
        MemoryLine(f"KV cache of {SEQUENCES_MIN} sequences", cache / min(cards, shape.kv_heads)),
    )
    if request.lora_rank:
        engine = sums.torch_engine_lines(shape, SEQUENCES_MIN, request.context, sums.BFLOAT16)
    if total(engine) > card.memory * ENGINE_SHARE:
        found.append(Shortage(f"rollout on {cards} cards", engine, card.memory * ENGINE_SHARE))
    if alone and not found:
        both = (MemoryLine("trainer", total(trainer)), MemoryLine("rollout", total(engine)))
        found.append(Shortage("trainer and rollout on one card", both, usable(card)))
    return tuple(found)
