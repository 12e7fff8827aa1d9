"""A plan fits the cards that it is for, and where nothing fits it names the shortage and the
cheapest change that fits.
"""

from dataclasses import replace

import pytest

from rollstream.config.config import validate_layers
from rollstream.config.sources import SettingLayers
from rollstream.sizes import arithmetic as sums, proposal
from rollstream.sizes.arithmetic import TrainerForm, total
from rollstream.sizes.devices import ACCELERATORS, GB, accelerator_named, parse_gpus
from rollstream.sizes.planner import PlanRequest, RunPlan, plan_run, usable
from rollstream.sizes.shapes import SHAPES


def request(model: str, gpus: str, context: int = 4096, lora: int = 0) -> PlanRequest:
    cards, card = parse_gpus(gpus)
    return PlanRequest(
        shape=SHAPES[model],
        card=card,
        cards=cards,
        context=context,
        store_gbps=10,
        network_gbps=400,
        lora_rank=lora,
    )


def plan(model: str, gpus: str, context: int = 4096, lora: int = 0) -> RunPlan:
    return plan_run(request(model, gpus, context, lora))


PLANS = [
    *((f"qwen2.5-{size}", f"1x{gb}GB") for size in ("0.5b", "1.5b", "3b") for gb in (24, 48, 80)),
    ("qwen2.5-7b", "2xH100"), ("qwen2.5-7b", "8xH100"), ("qwen2.5-32b", "16xH200"),
    ("llama-3.1-70b", "32xH100"), ("qwen3-30b-a3b", "8xH200"), ("mixtral-8x7b", "8xH200"),
    ("llama-3.1-405b", "1024xH200"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpus"), PLANS)
def test_a_proposed_layout_is_within_every_card(model: str, gpus: str) -> None:
    proposed = plan(model, gpus).proposed
    assert proposed is not None
    layout, card = proposed.layout, proposed.request.card
    assert layout is not None
    trainer, rollout = map(
        total, (proposal.trainer_lines(proposed), proposal.rollout_lines(proposed))
    )
    assert trainer <= usable(card)
    if proposed.request.lora_rank:
        assert rollout <= card.memory
    else:
        assert rollout == pytest.approx(card.memory * layout.memory_share)
    if layout.is_shared:
        assert trainer + rollout * (1 + layout.has_evaluation) <= card.memory
    else:
        own = layout.trainer_cards + layout.engines * layout.tensor_parallel
        assert own <= proposed.request.cards
    assert layout.kv_tokens >= 8 * proposed.request.context
    assert layout.form.micro_batch_tokens >= proposed.request.context


@pytest.mark.parametrize(("model", "gpus"), PLANS)
def test_the_proposed_settings_are_a_configuration(model: str, gpus: str, tmp_path) -> None:
    proposed = plan(model, gpus).proposed
    assert proposed is not None
    (tmp_path / "config.json").write_text("{}")
    settings = proposal.settings_of(proposed)
    settings["model"]["path"] = str(tmp_path)
    configuration = validate_layers(SettingLayers(dict(settings)))
    assert configuration.rollouts.context_max == proposed.request.context


def test_a_model_that_does_not_fit_is_trained_by_an_adapter_before_more_cards() -> None:
    found = plan("qwen2.5-1.5b", "1x24GB")
    assert found.layout is None
    assert [shortage.role for shortage in found.shortages] == ["trainer"]
    text = proposal.shortage_text(found)
    assert "trainer needs" in text
    assert text.endswith("train an adapter (model.lora.rank = 16)")
    assert found.change is not None
    assert found.change.request.cards == 1


def test_where_no_adapter_helps_more_cards_do() -> None:
    found = plan("qwen2.5-7b", "1x24GB")
    assert found.layout is None
    assert found.change is not None
    assert found.change.request.cards > 1


def test_nothing_is_proposed_where_nothing_fits() -> None:
    found = plan("llama-3.1-405b", "1x24GB", 131_072)
    assert found.proposed is None
    assert "no change of this plan fits" in proposal.shortage_text(found)


def test_405b_with_all_parameters_needs_more_than_80_gb_on_each_card() -> None:
    """Embedding and head are gathered in float32 on every rank, however many there are."""
    found = plan("llama-3.1-405b", "1024xH100")
    assert found.layout is None
    trainer = next(one for one in found.shortages if one.role == "trainer")
    lines = {line.what: line.bytes for line in trainer.lines}
    assert lines["gathered embedding and head"] == 4 * SHAPES["llama-3.1-405b"].root_parameters


def test_more_memory_takes_larger_micro_batches_and_recomputing_keeps_less() -> None:
    shape = SHAPES["qwen2.5-1.5b"]
    form = TrainerForm(micro_batch_tokens=4096)
    sizes = [sums.micro_batch_max(shape, form, gb * GB, 1024) for gb in (20, 40, 60, 80)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0 < sizes[-1]
    kept, recomputed = (
        sums.kept_bytes(shape, replace(form, recompute=flag)) for flag in (False, True)
    )
    assert recomputed < kept / 5


def test_state_divides_by_ranks_and_a_version_has_two_bytes_a_parameter() -> None:
    shape = SHAPES["qwen2.5-7b"]
    one, eight = (
        {line.what: line.bytes for line in sums.trainer_lines(shape, form)}
        for form in (TrainerForm(micro_batch_tokens=1), TrainerForm(micro_batch_tokens=1, ranks=8))
    )
    state = "masters, gradients, moments"
    assert one[state] == 8 * eight[state] == 16 * shape.parameters
    versions = sums.version_bytes(shape, 16)
    assert versions.full == 2 * shape.parameters
    assert versions.adapter == 2 * shape.adapter_parameters(16)
    assert sums.transfer_s(versions.full, 8) == pytest.approx(versions.full / 1e9)


def test_a_card_is_found_by_its_longest_name() -> None:
    peaks = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10": 125e12,
        "NVIDIA GeForce RTX 4090": 165e12,
    }
    for name, flops in peaks.items():
        found = accelerator_named(name)
        assert found is not None
        assert found.flops == flops
    assert accelerator_named("NVIDIA H100 PCIe") is ACCELERATORS["H100 PCIe"]
    assert accelerator_named("Tesla K80") is None
