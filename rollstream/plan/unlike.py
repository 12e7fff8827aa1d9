"""Plans a run on cards of several kinds (`--gpus 8xH100,16xL40S`): which train, which generate, and
which rollouts get the long answers. Ranks wait for the slowest kind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, prod
from typing import Literal

from rollstream.plan import engines
from rollstream.plan.engines import MEAN_SHARE, EngineSize, PlanRequest
from rollstream.plan.planner import (
    CardLayout,
    best_layout,
    decoding_rate,
    training_form,
    training_rate,
)
from rollstream.producers.engines.paced.lengths import NORMAL, LogNormal
from rollstream.run.sizes.arithmetic import TrainerForm
from rollstream.run.sizes.devices import CARDS_PER_MACHINE, Accelerator, CardKind
from rollstream.simulator.constants import CONSTANTS

Objective = Literal["speed", "price"]
ASSIGNMENTS_MAX = 20_000
"""A choice. With more, machines are assigned two (four, …) at a time, so that a plan takes about a
second.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindWork:
    """`trainer_cards` train, `engines` engines of the size `engine` generate `tokens_per_s`
    together, `request_per_s` for one request. Answers of up to `answers_max` tokens go here (0:
    none). Other cards are not needed.
    """

    kind: CardKind
    trainer_cards: int = 0
    engines: int = 0
    engine: EngineSize | None = None
    tokens_per_s: float = 0.0
    request_per_s: float = 0.0
    answers_max: int = 0

    @property
    def engine_cards(self) -> int:
        return 0 if self.engine is None else self.engines * self.engine.tensor_parallel

    @property
    def per_hour(self) -> float:
        return self.kind.price * (self.trainer_cards + self.engine_cards)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlikePlan:
    """`request` has the weakest card that trains. `alike` is the plan in which each card counts as
    the weakest of them, None if that does not fit.
    """

    request: PlanRequest
    works: tuple[KindWork, ...]
    form: TrainerForm
    train_tokens_per_s: float
    alike: CardLayout | None = None

    @property
    def rollout_tokens_per_s(self) -> float:
        return sum(work.tokens_per_s for work in self.works)

    @property
    def tokens_per_s(self) -> float:
        return min(self.train_tokens_per_s, self.rollout_tokens_per_s)

    @property
    def per_hour(self) -> float:
        """The price of the used cards; 0 where a used kind has no price."""
        used = [work for work in self.works if work.trainer_cards or work.engines]
        return sum(work.per_hour for work in used) if all(w.kind.price for w in used) else 0.0

    @property
    def trainer_cards(self) -> int:
        return sum(work.trainer_cards for work in self.works)


def plan_unlike(
    request: PlanRequest, kinds: Sequence[CardKind], objective: Objective = "speed"
) -> UnlikePlan | None:
    """The most trained tokens per second, or per price with the `objective` "price". `card` and
    `cards` of the request are not used.
    """

    def rank(plan: UnlikePlan) -> tuple[float, float, int, bool]:
        value = plan.tokens_per_s
        if objective == "price":
            value /= plan.per_hour
        return value, plan.rollout_tokens_per_s, -plan.trainer_cards, not plan.form.recompute

    best = max(plans_of(request, kinds, objective), key=rank, default=None)
    if best is None:
        return None
    cards = sum(kind.cards for kind in kinds)
    alike = best_layout(replace(request, card=weakest([k.card for k in kinds]), cards=cards))
    return replace(best, works=with_answers(best.works, request.context), alike=alike)


def weakest(cards: Sequence[Accelerator]) -> Accelerator:
    """The least of each property, if work is shared out equally."""
    return Accelerator(
        " and ".join(dict.fromkeys(card.name for card in cards)),
        min(card.memory for card in cards),
        min(card.flops for card in cards),
        min(card.bandwidth for card in cards),
        min(card.link for card in cards),
    )


def plans_of(
    request: PlanRequest, kinds: Sequence[CardKind], objective: Objective = "speed"
) -> Iterator[UnlikePlan]:
    """All that fit, with layers kept and recomputed, without `alike` and lengths of answers."""
    sizes = [engines.own_engine(_on(request, kind), kind.cards) for kind in kinds]
    forms: dict[tuple[Accelerator, int], list[TrainerForm]] = {}
    for numbers in _assignments(kinds, objective):
        training = [training_cards for training_cards, _ in numbers]
        generating = [
            rest // size.tensor_parallel if size is not None else 0
            for (_, rest), size in zip(numbers, sizes, strict=True)
        ]
        if not any(training) or not any(generating):
            continue
        card = weakest([kind.card for kind, n in zip(kinds, training, strict=True) if n])
        ranks = sum(training)
        trained = replace(request, card=card, cards=sum(kind.cards for kind in kinds))
        if (card, ranks) not in forms:
            candidates = (training_form(trained, ranks, recompute) for recompute in (False, True))
            forms[card, ranks] = [form for form in candidates if form is not None]
        works = tuple(
            _work(request, kind, size, used, count, sum(generating))
            for kind, size, used, count in zip(kinds, sizes, training, generating, strict=True)
        )
        for form in forms[card, ranks]:
            rate = training_rate(trained, form)
            yield UnlikePlan(request=trained, works=works, form=form, train_tokens_per_s=rate)


def _assignments(
    kinds: Sequence[CardKind], objective: Objective
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields, for each kind, how many of its cards train and how many may generate."""
    machines = 1
    while True:
        # All others generate, except under "price", where some may be left out.
        options = [_numbers(kind.cards, machines, objective) for kind in kinds]
        if prod(map(len, options)) <= ASSIGNMENTS_MAX:
            break
        machines *= 2
    yield from product(*options)
    for at, kind in enumerate(kinds):  # a trainer within one machine
        for some in range(1, min(CARDS_PER_MACHINE, kind.cards + 1)):
            others = [[(0, rest) for used, rest in pairs if not used] for pairs in options]
            for rest in product(*(pairs for n, pairs in enumerate(others) if n != at)):
                yield (*rest[:at], (some, kind.cards - some), *rest[at:])


def _numbers(cards: int, machines: int, objective: Objective) -> list[tuple[int, int]]:
    step = machines * CARDS_PER_MACHINE
    counts = sorted({*range(0, cards, step), cards})
    if objective == "speed":
        return [(used, cards - used) for used in counts]
    return [(used, rest) for used in counts for rest in counts if used + rest <= cards]


def _on(request: PlanRequest, kind: CardKind) -> PlanRequest:
    return replace(request, card=kind.card, cards=kind.cards)


def _work(
    request: PlanRequest,
    kind: CardKind,
    size: EngineSize | None,
    trainer_cards: int,
    count: int,
    engines_in_all: int,
) -> KindWork:
    if size is None or not count:
        return KindWork(kind=kind, trainer_cards=trainer_cards)
    rows, rate = decoding_rate(_on(request, kind), size, engines_in_all)
    return KindWork(
        kind=kind,
        trainer_cards=trainer_cards,
        engines=count,
        engine=size,
        tokens_per_s=count * rate,
        request_per_s=rate / rows,
    )


def with_answers(works: Sequence[KindWork], context: int) -> tuple[KindWork, ...]:
    """Kinds with slower requests get shorter answers, each kind its share of the
    generated tokens.
    """
    # Assumed: log-normal lengths with a mean of context / `MEAN_SHARE`, and the simulator's ratio
    # of 99th percentile and median.
    ratio = CONSTANTS["length_p99_over_median"].value
    spread = LogNormal(1.0, ratio).spread
    median = context / MEAN_SHARE / exp(spread**2 / 2)
    total = sum(work.tokens_per_s for work in works)
    bounds: Mapping[str, int] = {}
    assigned_per_s = 0.0
    for work in sorted(
        works, key=lambda kind_work: (kind_work.request_per_s, kind_work.kind.card.name)
    ):
        if not work.engines:
            continue
        assigned_per_s += work.tokens_per_s
        share = min(assigned_per_s / total, 1 - 1e-9) if total else 1 - 1e-9
        # Of all tokens, this share is in answers of up to `longest` tokens (log-normal).
        longest = median * exp(spread * (NORMAL.inv_cdf(share) + spread))
        is_last = assigned_per_s >= total * (1 - 1e-9)
        bounds = {**bounds, work.kind.card.name: context if is_last else int(longest)}
    return tuple(
        replace(work, answers_max=min(context, bounds.get(work.kind.card.name, 0)))
        for work in works
    )
