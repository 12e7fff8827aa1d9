"""A plan for cards of several kinds respects each card's memory, is the best of all assignments,
and its files are ones that each kind of machine takes.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.plan import unlike_proposal
from rollstream.plan.engines import engine_lines, usable
from rollstream.plan.planner import decoding_rate, plan_run, training_form, training_rate
from rollstream.plan.unlike import UnlikePlan, plan_unlike, weakest
from rollstream.run.sizes.arithmetic import total, trainer_lines
from rollstream.run.sizes.check import check_memory
from rollstream.run.sizes.devices import CARDS_PER_MACHINE, parse_kinds
from rollstream.run.supervisor.cards import GpuCard, assign_cards
from tests.sizes.test_planner import request
from tests.sizes.test_proposed_files import configuration_of, write_model

SEVERAL = [
    ("qwen2.5-7b", "8xH100,16xL40S", 0), ("qwen2.5-7b", "8xH100@2.5,16xL40S@0.9,8xL4@0.4", 0),
    ("qwen2.5-1.5b", "4xA100,4xL4", 0), ("qwen2.5-7b", "8xH800,8xH20", 0),
    ("qwen2.5-7b", "8xH100,16xL40S,8xL4", 16), ("qwen2.5-32b", "16xH200,16xA100", 0),
]  # fmt: skip


def plan(model: str, gpus: str, lora: int = 0, objective: str = "speed") -> UnlikePlan:
    found = plan_unlike(request(model, "8xH100", lora=lora), parse_kinds(gpus), objective)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(("model", "gpus", "lora"), SEVERAL)
def test_no_card_is_used_twice_or_beyond_its_memory(model: str, gpus: str, lora: int) -> None:
    found = plan(model, gpus, lora)
    assert found.trainer_cards > 0
    for work in found.works:
        assert work.trainer_cards + work.engine_cards <= work.kind.cards
        own = replace(found.request, card=work.kind.card)
        if work.trainer_cards:
            assert total(trainer_lines(own.shape, found.form)) <= usable(work.kind.card)
        if work.engine is not None and work.engine.name == "vllm":
            lines = total(engine_lines(own, work.engine))
            assert lines <= work.kind.card.memory * work.engine.memory_share * (1 + 1e-9)


def test_the_assignment_is_the_best_of_all_machines() -> None:
    """Two machines of one kind and one of another, tried by hand."""
    kinds = parse_kinds("16xH100,8xL40S")
    base = request("qwen2.5-7b", "8xH100")
    best = 0.0
    for used in product((0, 8, 16), (0, 8)):
        cards = [kind.card for kind, n in zip(kinds, used, strict=True) if n]
        engines = [kind.cards - n for kind, n in zip(kinds, used, strict=True)]
        if not cards or not any(engines):
            continue
        on = replace(base, card=weakest(cards), cards=24)
        forms = [training_form(on, sum(used), recompute) for recompute in (False, True)]
        train = max((training_rate(on, form) for form in forms if form is not None), default=0.0)
        found = plan("qwen2.5-7b", "16xH100,8xL40S")
        rollout = sum(
            count * decoding_rate(replace(base, card=work.kind.card), work.engine, sum(engines))[1]
            for count, work in zip(engines, found.works, strict=True)
            if work.engine is not None
        )
        best = max(best, min(train, rollout))
    assert plan("qwen2.5-7b", "16xH100,8xL40S").tokens_per_s >= best


def test_cards_of_high_bandwidth_generate_and_those_of_much_arithmetic_train() -> None:
    """RollArt's machines (arXiv 2512.22560): an H20 reads faster and computes a seventh."""
    compute, bandwidth = plan("qwen2.5-7b", "8xH800,8xH20").works
    assert compute.trainer_cards > 0
    assert (bandwidth.trainer_cards, bandwidth.engines) == (0, 8)


def test_the_longest_answers_go_to_the_kind_with_the_fastest_requests() -> None:
    works = [work for work in plan("qwen2.5-7b", "32xH100,16xL40S,16xL4").works if work.engines]
    assert len(works) == 3
    by_speed = sorted(works, key=lambda work: work.request_per_s)
    bounds = [work.answers_max for work in by_speed]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1] == 4096


def test_an_assignment_treated_alike_is_that_of_the_weakest_card() -> None:
    found = plan("qwen2.5-7b", "8xH100,16xL40S")
    assert found.alike is not None
    alike = plan_run(request("qwen2.5-7b", "24xL40S")).layout
    assert alike is not None
    assert found.alike.tokens_per_s == pytest.approx(alike.tokens_per_s)
    assert found.tokens_per_s > found.alike.tokens_per_s


def test_the_best_price_is_no_more_than_that_of_the_fastest_plan() -> None:
    gpus = "16xH100@9,16xL40S@0.5"
    fast, cheap = plan("qwen2.5-1.5b", gpus), plan("qwen2.5-1.5b", gpus, objective="price")
    prices = [unlike_proposal.million_price(p.per_hour, p.tokens_per_s) for p in (fast, cheap)]
    assert prices[1] < prices[0]
    assert fast.tokens_per_s > cheap.tokens_per_s


def test_kinds_that_hold_no_trainer_make_no_plan() -> None:
    base = request("llama-3.1-405b", "8xH100")
    assert plan_unlike(base, parse_kinds("8xL4,8xL40S")) is None


@pytest.mark.parametrize(("model", "gpus", "lora"), SEVERAL)
def test_each_machine_takes_its_file(model: str, gpus: str, lora: int, tmp_path: Path) -> None:
    found = plan(model, gpus, lora)
    write_model(found.request.shape, tmp_path)
    files = unlike_proposal.machine_files(found)
    texts = unlike_proposal.toml_files(found, "plan.toml")
    assert len(texts) == len(files), "each has a name of its own"
    engines = 0
    for (file, own), text in zip(files, texts.values(), strict=True):
        c = configuration_of(text, tmp_path)
        count = min(own.request.cards, CARDS_PER_MACHINE)
        card = own.request.card
        cards = [GpuCard(str(number), card.name, card.memory) for number in range(count)]
        assigned = assign_cards(c, cards)
        check_memory(c, tmp_path, assigned, file.ranks)
        engines += file.machines * c.rollouts.count if file.generates else 0
    assert engines >= sum(work.engines for work in found.works)
    assert sum("trainer" in file.settings["devices"] for file, _ in files) >= 1
    assert sum(file.settings["evaluation"]["enabled"] for file, _ in files) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("8xH100@,8xL4", "price"), ("8xH100@x", "price"), ("4xL4,4xL4", "once"), ("8xK80", "known")],
)
def test_a_wrong_list_of_cards_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_kinds(text)
