"""How many cards train and how many generate, the micro-batch and the KV cache. Memory decides
which divisions fit, tokens per second (`rates.py`) which is best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rollstream.plan import engines, rates
from rollstream.plan.engines import ADAPTER_RANK, ENGINE_SHARE, EngineSize, PlanRequest, usable
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import MemoryLine, TrainerForm, total
from rollstream.run.sizes.devices import CARDS_PER_MACHINE
from rollstream.run.sizes.shapes import ModelShape

LAG_MAX = 4
"""The default of `dispatch.max_lag`."""
MICRO_BATCH_TOKENS_MAX = 32_768
"""Unless communication takes longer than its arithmetic. A choice: about 80 times 420 tokens, from
which on a product with weights takes longer for its arithmetic than for reading the weights, on
every card of `devices.py` (flops over bandwidth is at most 420).
"""
SEQUENCES_WANTED = 64
"""On a shared card so many of the KV cache's longest sequences count before all other properties:
the default of `rollouts.slots`.
"""
CARDS_MAX = 16_384
"""A choice: the cluster that trained Llama 3.1 405B (arXiv 2407.21783)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLayout:
    """`trainer_cards` ranks (one per card) train, `engines` engines of the size `engine` generate;
    with `is_shared` both on one card. `form` has the proposed micro-batch; `micro_batch_max` is the
    largest one that fits, in tokens.
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
        """Returns the tokens per s of the slower side; 0 for unknown speeds."""
        return min(self.train_tokens_per_s, self.rollout_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A role that does not fit: its least memory, part by part (`lines`), and the bytes `available`
    on a card.
    """

    role: str
    lines: tuple[MemoryLine, ...]
    available: float

    @property
    def needed(self) -> float:
        return total(self.lines)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """If the request does not fit, `layout` is None, `shortages` has the reasons, and `change` is
    the plan of the cheapest changed request that fits, or None.
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
    layout = best_layout(request)
    if layout is not None:
        return RunPlan(request, layout)
    for other in _changes(request):
        layout = best_layout(other)
        if layout is not None:
            return RunPlan(request, None, shortages_of(request), RunPlan(other, layout))
    return RunPlan(request, None, shortages_of(request))


def _changes(request: PlanRequest) -> Iterator[PlanRequest]:
    # By ascending cost: a LoRA adapter and 8-bit weights cost no card.
    if not request.lora_rank:
        yield replace(request, lora_rank=ADAPTER_RANK)
        yield replace(request, fp8=True)
    cards = request.cards
    while cards < CARDS_MAX:
        cards = cards + 1 if cards < CARDS_PER_MACHINE else min(2 * cards, CARDS_MAX)
        yield replace(request, cards=cards)
        if not request.lora_rank:
            yield replace(request, cards=cards, fp8=True)


def best_layout(request: PlanRequest) -> CardLayout | None:
    """The fitting layout with the highest rate; for unknown speeds the one closest to two equal
    halves.
    """
    if request.cards == 1:
        return _shared_layout(request)
    layouts = [
        layout
        for cards in _trainer_cards(request)
        for recompute in (False, True)
        if (layout := _layout(request, cards, recompute)) is not None
    ]
    half = request.cards / 2

    def rank(layout: CardLayout) -> tuple[float, float, float, bool]:
        balance = -abs(layout.trainer_cards - half)
        generated = layout.rollout_tokens_per_s
        # A step lasts as long as the slower side needs for its tokens.
        return layout.tokens_per_s, generated, balance, not layout.form.recompute

    return max(layouts, key=rank, default=None)


def _trainer_cards(request: PlanRequest) -> Sequence[int]:
    cards = request.cards
    if request.reference or request.critic:  # ranks share no other model
        return range(1, 2)
    if request.lora_rank:
        alone = trainer_form(request, 1, recompute=True)
        # An adapter is trained on a single card if that has room for the frozen model, too.
        if total(sums.trainer_lines(request.shape, alone)) <= usable(request.card):
            return range(1, 2)
    if cards <= CARDS_PER_MACHINE:
        return range(1, cards)
    # Whole machines.
    return range(CARDS_PER_MACHINE, cards, CARDS_PER_MACHINE)


def _layout(request: PlanRequest, trainer_cards: int, recompute: bool) -> CardLayout | None:
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


def training_form(request: PlanRequest, ranks: int, recompute: bool) -> TrainerForm | None:
    """Returns the training form with the proposed micro-batch; None if it does not fit."""
    form = _largest_form(request, trainer_form(request, ranks, recompute))
    return None if form is None else _proposed_form(request, form)


def training_rate(request: PlanRequest, form: TrainerForm) -> float:
    """Returns tokens per second on cards of their own."""
    link = request.link(form.ranks)
    return rates.train_tokens_per_s(request.shape, form, link, request.step_tokens)


def decoding_rate(
    request: PlanRequest, engine: EngineSize, engines_in_all: int
) -> tuple[float, float]:
    """Returns rows that an engine decodes, and its tokens per second."""
    # The KV cache holds so many sequences of half the context; the lag bound admits so many
    # trajectories.
    rows = min(engine.slots, max(1, 2 * engine.kv_tokens // request.context))
    rows = min(rows, (1 + LAG_MAX) * request.trajectories / engines_in_all)
    return rows, rates.decode_tokens_per_s(
        request.shape,
        request.card,
        engine.tensor_parallel,
        rows,
        request.context,
        request.weight_item,
    )


def _proposed_form(request: PlanRequest, form: TrainerForm) -> TrainerForm:
    tokens_max = min(form.micro_batch_tokens, MICRO_BATCH_TOKENS_MAX)
    if request.card.flops:
        at_most = replace(form, micro_batch_tokens=tokens_max)
        compute_s, collectives_s = rates.round_s(request.shape, at_most, request.link(form.ranks))
        tokens_max = form.micro_batch_tokens if collectives_s > compute_s else tokens_max
    # In a round each rank trains one micro-batch: the smallest with which a step takes as few
    # rounds as with the largest useful one.
    rounds = ceil(request.step_tokens / (form.ranks * tokens_max))
    each = ceil(request.step_tokens / (form.ranks * rounds * request.context)) * request.context
    return replace(form, micro_batch_tokens=max(request.context, min(each, tokens_max)))


def _largest_form(request: PlanRequest, form: TrainerForm) -> TrainerForm | None:
    if (form.other_policies or form.critic) and form.ranks > 1:
        return None
    tokens = largest_micro_batch(request.shape, form, usable(request.card), request.context)
    return replace(form, micro_batch_tokens=tokens) if tokens else None


def largest_micro_batch(shape: ModelShape, form: TrainerForm, memory: float, step: int) -> int:
    """The largest multiple of `step` tokens, at most 2^17, whose lines fit `memory` bytes; 0 if not
    even one step fits.
    """
    low, high = 0, (1 << 17) // step

    def fits(steps: int) -> bool:
        return (
            total(sums.trainer_lines(shape, replace(form, micro_batch_tokens=steps * step)))
            <= memory
        )

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * step


def trainer_form(request: PlanRequest, ranks: int, recompute: bool) -> TrainerForm:
    """Returns the trainer form with a micro-batch of one sequence of full context; `recompute`
    means gradient checkpointing.
    """
    return TrainerForm(
        micro_batch_tokens=request.context,
        ranks=ranks,
        recompute=recompute,
        lora_rank=request.lora_rank or None,
        other_policies=int(request.reference),
        critic=request.critic,
    )


def _shared_layout(request: PlanRequest) -> CardLayout | None:
    # The trainer gets the memory that its micro-batch needs, the engines get the rest.
    layouts = [
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

    return max(layouts, key=rank, default=None)


def _shared_form(
    request: PlanRequest, evaluated: bool, recompute: bool, sequences: int
) -> CardLayout | None:
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
    # On a shared card each side gets half of the time.
    share = 0.5 if layout.is_shared else 1.0
    _, decode = decoding_rate(request, layout.engine, layout.engines)
    return replace(
        layout,
        train_tokens_per_s=share * training_rate(request, layout.form),
        rollout_tokens_per_s=share * layout.engines * decode,
    )


def shortages_of(request: PlanRequest) -> tuple[Shortage, ...]:
    """Returns roles that do not fit even on as many cards as they can get; on a single card also
    trainer and rollout together.
    """
    shape, card = request.shape, request.card
    alone = request.cards == 1
    ranks = 1 if alone else _trainer_cards(request)[-1]
    form = trainer_form(request, ranks, recompute=True)
    shortages: list[Shortage] = []
    trainer = sums.trainer_lines(shape, form)
    if total(trainer) > usable(card):
        shortages.append(Shortage("trainer", trainer, usable(card)))
    cards, engine = engines.least_lines(request, 1 if alone else request.cards - 1)
    if total(engine) > card.memory * ENGINE_SHARE:
        shortages.append(Shortage(f"rollout on {cards} cards", engine, card.memory * ENGINE_SHARE))
    if alone and not shortages:
        both = (MemoryLine("trainer", total(trainer)), MemoryLine("rollout", total(engine)))
        shortages.append(Shortage("trainer and rollout on one card", both, usable(card)))
    return tuple(shortages)
