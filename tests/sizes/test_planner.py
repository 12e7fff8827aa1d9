"""A plan fits the cards that it is for, and where nothing fits it names the shortage and the
cheapest change that fits.
"""

from dataclasses import replace
from functools import cache

import pytest

from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import ConfigurationError
from rollstream.plan import planner, proposal, rates
from rollstream.plan.engines import PlanRequest, usable
from rollstream.plan.planner import RunPlan, plan_run
from rollstream.plan.proposed_files import toml_files
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import TrainerForm, total
from rollstream.run.sizes.devices import ACCELERATORS, GB, accelerator_named, parse_gpus
from rollstream.run.sizes.shapes import SHAPES


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


@cache
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
    if layout.engine.name == "torch":
        assert rollout <= card.memory
    else:
        assert rollout == pytest.approx(card.memory * layout.engine.memory_share)
    if layout.is_shared:
        assert trainer + rollout * (1 + layout.engine.has_evaluation) <= card.memory
    else:
        own = layout.trainer_cards + layout.engines * layout.engine.tensor_parallel
        assert own <= proposed.request.cards
    assert layout.engine.kv_tokens >= 8 * proposed.request.context
    assert layout.form.micro_batch_tokens >= proposed.request.context


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


@pytest.mark.parametrize("cards", [1, 9000])
def test_no_more_cards_are_tried_than_the_largest_cluster_has(cards: int) -> None:
    asked = request("llama-3.1-405b", f"{cards}xH100")
    tried = {other.cards for other in planner._changes(asked)}
    assert max(tried) == planner.CARDS_MAX == 16_384


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
    sizes = [planner.largest_micro_batch(shape, form, gb * GB, 1024) for gb in (20, 40, 60, 80)]
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
    assert one[state] == 16 * shape.parameters
    assert one[state] <= 8 * eight[state] < 1.001 * one[state], "norms and biases are whole rows"
    versions = rates.version_bytes(shape, 16)
    assert versions.full == 2 * shape.parameters
    assert versions.adapter == 2 * shape.adapter_parameters(16)
    assert rates.transfer_s(versions.full, 8) == pytest.approx(versions.full / 1e9)


def test_a_reference_is_a_second_model_on_the_only_training_card() -> None:
    shape = SHAPES["qwen2.5-1.5b"]
    plain = TrainerForm(micro_batch_tokens=4096)
    both = replace(plain, other_policies=2, compute="float32")
    lines = {line.what: line.bytes for line in sums.trainer_lines(shape, both)}
    assert lines["reference and proximal policy"] == 2 * 4 * shape.parameters
    asked = replace(request("qwen2.5-1.5b", "8xH100"), reference=True)
    found, without = plan_run(asked), plan("qwen2.5-1.5b", "8xH100")
    assert found.layout is not None
    assert without.layout is not None
    assert found.layout.trainer_cards == 1
    second = proposal.figures(found)["trainer_bytes"]["reference and proximal policy"]
    assert second == 2 * shape.parameters
    assert sums.form_of(TrainerSettings(reference_kl=0.1), 1).other_policies == 1
    assert "reference_kl = 0.04" in next(iter(toml_files(found, "plan.toml").values()))


def test_a_critic_is_a_trained_model_on_the_only_training_card() -> None:
    """Without a head; beside adapters it has a base of its own, but trains adapters."""
    shape = SHAPES["qwen2.5-1.5b"]
    plain = TrainerForm(micro_batch_tokens=4096, critic=True, compute="float32", workers=2)
    lines = {line.what: line.bytes for line in sums.trainer_lines(shape, plain)}
    assert lines["critic"] == (16 + 2 * 4) * shape.parameters
    adapted = {
        line.what: line.bytes
        for line in sums.trainer_lines(shape, replace(plain, lora_rank=8, workers=1))
    }
    expected = 4 * shape.parameters + 20 * shape.adapter_parameters(8)
    assert adapted["critic"] == expected
    untied = SHAPES["qwen2.5-7b"]
    (alone,) = [x.bytes for x in sums.trainer_lines(untied, plain) if x.what == "critic"]
    assert alone == 24 * (untied.parameters - untied.embedding_parameters)
    host, single = (
        {line.what: line.bytes for line in sums.trainer_host_lines(shape, form, 2)}
        for form in (plain, replace(plain, critic=False))
    )
    assert host["checkpoint being written"] == 2 * single["checkpoint being written"]
    assert host["copies being published"] == single["copies being published"]
    found = plan_run(replace(request("qwen2.5-1.5b", "8xH100"), critic=True))
    assert found.layout is not None
    assert found.layout.trainer_cards == 1
    assert "critic" in proposal.figures(found)["trainer_bytes"]
    assert 'preset = "ppo"' in next(iter(toml_files(found, "plan.toml").values()))
    own, shared = (
        sums.form_of(
            TrainerSettings.model_validate({"advantage": "gae", "critic": {"body": body}}), 1
        )
        for body in ("own", "policy")
    )
    assert (own.critic, shared.critic) == (True, False)


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
    for name in ("A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100 40 GB", "A100 40GB"):
        assert accelerator_named(name) is ACCELERATORS["A100 40GB"]
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "H100 96GB", "A100-SXM4-40GB MIG 1g.5gb"):
        assert accelerator_named(name) is None


@pytest.mark.parametrize("text", ["8xH100", "8 x h100", "8 H100", "H100 x8", "8xH100 SXM5"])
def test_a_number_of_cards_has_several_forms(text: str) -> None:
    assert parse_gpus(text) == (8, ACCELERATORS["H100"])
    assert parse_gpus("2 24 GB")[0] == 2
    for unclear in ("8xH100 x8", "x8", "4 8"):
        with pytest.raises(ConfigurationError, match="write a number and a card"):
            parse_gpus(unclear)


def test_a_rank_holds_whole_rows_of_every_tensor() -> None:
    """405B on 512 ranks: 32 of 16384 rows of queries, output and down, 2 of 1024 of keys and
    values, 104 of 53248 of gate and up, 251 of 128256 of embedding and head.
    """
    form = TrainerForm(micro_batch_tokens=4096, ranks=512)
    matrices = (32 + 32 + 2 + 2 + 104 + 104) * 16_384 + 32 * 53_248
    norms = 2 * 16_384
    roots = 2 * 251 * 16_384 + 16_384
    expected = 126 * (matrices + norms) + roots
    assert sums.own_parameters(SHAPES["llama-3.1-405b"], form) == expected == 796_835_840


def test_offloaded_state_is_in_host_memory() -> None:
    shape = SHAPES["qwen2.5-7b"]
    form = TrainerForm(micro_batch_tokens=4096, recompute=True)
    offloaded = replace(form, offload=True)
    device, host = (
        total(lines(offloaded)) - total(lines(form))
        for lines in (
            lambda one: sums.trainer_lines(shape, one),
            lambda one: sums.trainer_host_lines(shape, one, sums.BFLOAT16),
        )
    )
    assert -device == 16 * shape.parameters
    # The state is lent to its checkpoint, where it would be copied from the device.
    assert host == (16 - 12) * shape.parameters


def test_ranks_beyond_the_experts_hold_no_less_of_them() -> None:
    """The 8 experts of a layer are one tensor of 8 rows: 16 ranks divide them no further."""
    shape = SHAPES["mixtral-8x7b"]
    own = [
        sums.own_parameters(shape, TrainerForm(micro_batch_tokens=1, ranks=n)) for n in (1, 8, 16)
    ]
    experts = 32 * 3 * 4096 * 14_336  # one of each layer
    assert own[0] == shape.parameters
    assert own[1] > own[2] > experts
    assert own[2] < experts + (shape.parameters - 8 * experts) / 8


def test_the_rank_that_owns_the_embedding_publishes_all_of_it() -> None:
    shape = SHAPES["llama-3.1-405b"]
    form = TrainerForm(micro_batch_tokens=4096, ranks=512)
    lines = {one.what: one.bytes for one in sums.trainer_host_lines(shape, form, sums.BFLOAT16)}
    assert lines["copies being published"] == 2 * 2 * 128_256 * 16_384
    assert lines["checkpoint being written"] == 12 * 796_835_840


def test_a_rollout_holds_a_small_version_beside_its_engine_and_streams_a_large_one() -> None:
    for layers, holds in ((1, True), (24, False)):
        shape = replace(SHAPES["qwen2.5-0.5b"], layers=layers, vocabulary=1000)
        lines = {
            one.what: one.bytes for one in sums.torch_engine_lines(shape, 4, 512, 4, sums.BFLOAT16)
        }
        assert lines["version held by the rollout"] == (2 * shape.parameters if holds else 0)


def test_the_group_of_embedding_and_head_is_reduced_when_the_layers_are_gone() -> None:
    """Its gradients and their copy, 8 bytes each, replace the layers, the head's gradient and the
    activations; only the bytes beyond these count.
    """
    shape = SHAPES["llama-3.1-405b"]
    small, large = (
        {line.what: line.bytes for line in sums.trainer_lines(shape, form)}
        for form in (
            TrainerForm(micro_batch_tokens=16, ranks=512, recompute=True),
            TrainerForm(micro_batch_tokens=4096, ranks=512),
        )
    )
    layer, embedding = shape.layer_parameters, 128_256 * 16_384
    for lines in (small, large):
        assert lines["gathered layers"] == 2 * 2 * layer
        assert lines["gradients of one layer, to reduce"] == (2 + 4) * layer
        assert lines["gathered embedding and head"] == 4 * (2 * embedding + 16_384)
        assert lines["gradient of the head"] == 4 * embedding
    beyond = "reducing embedding and head, beyond them"
    assert large[beyond] == 0 == small[beyond]  # 33.6 GB against 31.9 + 8.4


def test_a_round_takes_as_long_as_its_arithmetic_or_its_collectives() -> None:
    """7B, 4096 tokens for each of 4 H100: 6 · N · 4096 flops at 0.35 of 989e12; 8 bytes of every
    parameter, of which three quarters come from other ranks.
    """
    shape, h100 = SHAPES["qwen2.5-7b"], ACCELERATORS["H100"]
    form = TrainerForm(micro_batch_tokens=4096, ranks=4)
    compute_s, collectives_s = rates.round_s(shape, form, rates.trainer_link(h100, 4, 100))
    assert compute_s == pytest.approx(6 * 7_615_616_512 * 4096 / (0.35 * 989e12))
    assert collectives_s == pytest.approx(8 * 7_615_616_512 * 0.75 / 450e9)
    asked = plan("qwen2.5-7b", "8xH100")
    layout = asked.layout
    assert layout is not None
    both = rates.round_s(shape, layout.form, asked.request.link(layout.form.ranks))
    named = proposal.figures(asked)["round_seconds"]
    assert (named["compute"], named["collectives"]) == both
    # Ten micro-batches are three rounds, and a step has two seconds of other work.
    found = rates.train_tokens_per_s(shape, form, rates.trainer_link(h100, 4, 100), 10 * 4096)
    assert found == pytest.approx(40_960 / (2 + 3 * compute_s))


def test_a_step_is_as_long_on_both_sides_as_whole_machines_allow() -> None:
    """70B in steps of many rounds."""
    asked = replace(request("llama-3.1-70b", "256xH200"), network_gbps=3200, groups=16_384)
    layout = plan_run(asked).layout
    assert layout is not None
    sides = layout.train_tokens_per_s, layout.rollout_tokens_per_s
    assert min(sides) > 0.9 * max(sides)
    own = layout.trainer_cards + layout.engine.tensor_parallel * layout.engines
    assert own == 256


def test_cards_that_a_step_cannot_use_do_not_train() -> None:
    """A step of 1024 · 1024 tokens has 256 micro-batches of one longest sequence: more ranks have
    nothing to do, and their cards generate.
    """
    asked = replace(request("llama-3.1-405b", "1024xH200"), network_gbps=3200)
    layout = plan_run(asked).layout
    assert layout is not None
    assert (layout.trainer_cards, layout.engines, layout.engine.tensor_parallel) == (256, 96, 8)
    assert layout.form.micro_batch_tokens == 4096


def test_beyond_a_machine_a_collective_has_the_machines_network() -> None:
    h100 = ACCELERATORS["H100"]
    assert rates.trainer_link(h100, 8, 400).collective == 450e9
    assert rates.trainer_link(h100, 16, 400).collective == 50e9
    assert rates.trainer_link(h100, 16, 8000).collective == 450e9


def test_an_engine_reads_weights_and_cache_and_sums_each_layer_over_its_cards() -> None:
    """7B, one row of 4096 / 2 tokens on average: 2 bytes a parameter and 57 344 a cached token."""
    shape, h100 = SHAPES["qwen2.5-7b"], ACCELERATORS["H100"]
    read_s = (2 * 7_615_616_512 + 2048 * 57_344) / (0.75 * 3.35e12)
    one, two = (rates.decode_tokens_per_s(shape, h100, n, 1, 4096, 2.0) for n in (1, 2))
    assert one == pytest.approx(1 / (0.004 + read_s))
    assert two == pytest.approx(1 / (0.004 + 2 * 28 * 15e-6 + read_s / 2))


def test_ranks_divide_the_frozen_base_and_the_factors() -> None:
    shape = SHAPES["qwen2.5-32b"]
    one, four = (
        {line.what: line.bytes for line in sums.trainer_lines(shape, form)}
        for form in (
            TrainerForm(micro_batch_tokens=4096, lora_rank=16, ranks=ranks) for ranks in (1, 4)
        )
    )
    assert four["frozen base"] == pytest.approx(one["frozen base"] / 4, rel=0.01)
    assert four[sums.STATE] == pytest.approx(one[sums.STATE] / 4, rel=0.01)
    assert "gradient of the head" not in four, "nothing in the base has a gradient"


def test_an_adapter_takes_several_cards_where_one_does_not_hold_its_base() -> None:
    asked = request("qwen2.5-32b", "8x80GB", context=16384, lora=16)
    alone = TrainerForm(micro_batch_tokens=16384, lora_rank=16, recompute=True)
    assert total(sums.trainer_lines(asked.shape, alone)) > usable(asked.card)
    assert "trainer" not in {one.role for one in plan_run(asked).shortages}
    layout = plan("qwen2.5-7b", "4x80GB", lora=16).layout
    assert layout is not None
    assert layout.trainer_cards == 1
