"""Chooses how a model is trained on some cards, by arithmetic alone: which cards train and which
generate, the micro-batch and the KV cache, or, where nothing fits, the cheapest change that does.
`plan_run` tries every division of the cards (`best_layout`): memory (`arithmetic`, `engines`)
decides which of them fit, and rates (`rates`) which of those is best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rollstream.sizes import arithmetic as sums, engines, rates
from rollstream.sizes.arithmetic import MemoryLine, TrainerForm, total
from rollstream.sizes.devices import CARDS_PER_MACHINE
from rollstream.sizes.engines import ADAPTER_RANK, ENGINE_SHARE, EngineSize, PlanRequest, usable

LAG_MAX = 4
"""Rollouts generate at most this many steps ahead: the default of `dispatch.max_lag`."""
MICRO_BATCH_TOKENS_MAX = 32_768
"""Larger micro-batches gain nothing unless collectives take longer than them. A choice, 80 times
the tokens at which a product with weights is bound by arithmetic: flops over bandwidth of the
table's cards is at most 420.
"""
SEQUENCES_WANTED = 64
"""A shared card's cache comes before anything else until it holds this many longest sequences. A
choice: the default of `rollouts.slots`.
"""
CARDS_MAX = 16_384
"""A proposed change takes at most this many cards. A choice: the size of the cluster that trained
Llama 3.1 405B (arXiv 2407.21783).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLayout:
    """Divides the cards such that each role fits: `trainer_cards` ranks train, and `engines`
    engines of the size `engine` generate. With `is_shared` both use one and the same card.
    `micro_batch_max` is the largest micro-batch that fits, in tokens; `form` has the proposed one.
    """

    form: TrainerForm
    trainer_cards: int
    engines: int
    engine: EngineSize
    is_shared: bool = False
    micro_batch_max: int = 0
    train_tokens_per_s: float = 0.0
    rollout_tokens_per_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Returns the rate of the slower side; 0 where speeds are unknown."""
        return min(self.train_tokens_per_s, self.rollout_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Reports a role that does not fit a card: the lines of its least memory, and the available
    bytes.
    """

    role: str
    lines: tuple[MemoryLine, ...]
    available: float

    @property
    def needed(self) -> float:
        return total(self.lines)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Answers a request. Without a `layout` the request does not fit: then `shortages` gives the
    reasons, and `change`, unless None, is the plan of the cheapest changed request that does.
    """

    request: PlanRequest
    layout: CardLayout | None
    shortages: tuple[Shortage, ...] = ()
    change: "RunPlan | None" = None

    @property
    def proposed(self) -> "RunPlan | None":
        """Returns the plan that fits: this one, or that of the change; None if neither does."""
        return self if self.layout is not None else self.change


def plan_run(request: PlanRequest) -> RunPlan:
    """Returns the best layout of the request, or its shortages with the cheapest change. Changes
    that cost no card are tried first (an adapter in place of all parameters, 8-bit weights in the
    rollouts), then more cards.
    """
    layout = best_layout(request)
    if layout is not None:
        return RunPlan(request, layout)
    for other in _changes(request):
        layout = best_layout(other)
        if layout is not None:
            return RunPlan(request, None, shortages_of(request), RunPlan(other, layout))
    return RunPlan(request, None, shortages_of(request))


def _changes(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yields other requests for the same model, by ascending cost."""
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
    """Returns the layout with the highest rate of those that fit in memory, None if none fits. A
    layout's rate is that of its slower side, because a step lasts as long as that side needs for
    its tokens. Without known speeds the layout with equal halves wins.
    """
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
    """Returns the numbers of cards that may train: any on one machine, else whole machines. An
    adapter is trained on one card where that holds the base.
    """
    cards = request.cards
    if request.lora_rank:
        alone = trainer_form(request, 1, recompute=True)
        if total(sums.trainer_lines(request.shape, alone)) <= usable(request.card):
            return range(1, 2)
    if cards <= CARDS_PER_MACHINE:
        return range(1, cards)
    return range(CARDS_PER_MACHINE, cards, CARDS_PER_MACHINE)


def _layout(request: PlanRequest, trainer_cards: int, recompute: bool) -> CardLayout | None:
    """Returns the layout with this many training cards; None if a role does not fit."""
    form = _largest_form(request, trainer_form(request, trainer_cards, recompute))
    rest = request.cards - trainer_cards
    engine = None if form is None else engines.own_engine(request, rest)
    if form is None or engine is None:
        return None
    layout = CardLayout(
        form=_proposed_form(request, form),
        trainer_cards=trainer_cards,
        engines=rest // engine.tensor_parallel,
        engine=engine,
        micro_batch_max=form.micro_batch_tokens,
    )
    return _rated(request, layout)


def _proposed_form(request: PlanRequest, form: TrainerForm) -> TrainerForm:
    """Returns the form with the smallest micro-batch that needs as few rounds (one micro-batch on
    each rank) as the largest useful one; it holds at least one longest sequence.
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
    """Returns the form with the largest micro-batch that fits a card, None if no sequence does."""
    tokens = sums.micro_batch_max(request.shape, form, usable(request.card), request.context)
    return replace(form, micro_batch_tokens=tokens) if tokens else None


def trainer_form(request: PlanRequest, ranks: int, recompute: bool) -> TrainerForm:
    """Returns a trainer's form with a micro-batch of one longest sequence; `recompute` means
    gradient checkpointing.
    """
    return TrainerForm(
        micro_batch_tokens=request.context,
        ranks=ranks,
        recompute=recompute,
        lora_rank=request.lora_rank or None,
    )


def _shared_layout(request: PlanRequest) -> CardLayout | None:
    """Returns the best layout of trainer and rollout on one card, with the evaluation where it fits
    too; None if none fits. The trainer gets what its micro-batch needs, the engines the rest; the
    cache is filled up to `SEQUENCES_WANTED` first.
    """
    found = [
        layout
        for evaluated in (True, False)
        for recompute in (False, True)
        for sequences in (4, 1)
        if (layout := _shared_form(request, evaluated, recompute, sequences)) is not None
    ]

    def rank(layout: CardLayout) -> tuple[int, bool, float, bool]:
        engine, is_kept = layout.engine, not layout.form.recompute
        cached = min(engine.kv_tokens, SEQUENCES_WANTED * request.context)
        return cached, engine.has_evaluation, layout.tokens_per_s, is_kept

    return max(found, key=rank, default=None)


def _shared_form(
    request: PlanRequest, evaluated: bool, recompute: bool, sequences: int
) -> CardLayout | None:
    """Returns the layout of one card with micro-batches of this many longest sequences, None if the
    rest of the card holds no engine.
    """
    processes, tokens = 2 + evaluated, sequences * request.context
    form = replace(trainer_form(request, 1, recompute), micro_batch_tokens=tokens)
    trainer = total(sums.trainer_lines(request.shape, form)) / (1 - sums.FRAGMENTED)
    rest = request.card.memory - trainer - sums.CONTEXT_BYTES * processes
    engine = engines.shared_engine(request, rest, evaluated)
    if engine is None:
        return None
    layout = CardLayout(
        form=form,
        trainer_cards=1,
        engines=1,
        engine=engine,
        is_shared=True,
        micro_batch_max=tokens,
    )
    return _rated(request, layout)


def _rated(request: PlanRequest, layout: CardLayout) -> CardLayout:
    """Returns the layout with its rates. On a shared card each side gets half of the time."""
    share = 0.5 if layout.is_shared else 1.0
    form, card, engine = layout.form, request.card, layout.engine
    train = rates.train_tokens_per_s(
        request.shape, form, request.link(form.ranks), request.step_tokens
    )
    rows = min(engine.slots, max(1, 2 * engine.kv_tokens // request.context))
    rows = min(rows, (1 + LAG_MAX) * request.trajectories / layout.engines)
    decode = rates.decode_tokens_per_s(
        request.shape, card, engine.tensor_parallel, rows, request.context, request.weight_item
    )
    return replace(
        layout,
        train_tokens_per_s=share * train,
        rollout_tokens_per_s=share * layout.engines * decode,
    )


def shortages_of(request: PlanRequest) -> tuple[Shortage, ...]:
    """Returns the roles that do not fit even with the most cards that they can get."""
    shape, card = request.shape, request.card
    alone = request.cards == 1
    ranks = 1 if alone else _trainer_cards(request)[-1]
    form = trainer_form(request, ranks, recompute=True)
    found: list[Shortage] = []
    trainer = sums.trainer_lines(shape, form)
    if total(trainer) > usable(card):
        found.append(Shortage("trainer", trainer, usable(card)))
    cards, engine = engines.least_lines(request, 1 if alone else request.cards - 1)
    if total(engine) > card.memory * ENGINE_SHARE:
        found.append(Shortage(f"rollout on {cards} cards", engine, card.memory * ENGINE_SHARE))
    if alone and not found:
        both = (MemoryLine("trainer", total(trainer)), MemoryLine("rollout", total(engine)))
        found.append(Shortage("trainer and rollout on one card", both, usable(card)))
    return tuple(found)
