"""Parameters are counted exactly: as the models' authors publish them, and as transformers builds
them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.sizes.shapes import SHAPES, find_shape, shape_of

PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""Totals of the checkpoints' safetensors, as their pages on the Hub show them."""
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
OWN = {
    "qwen2": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_the_published_number_of_parameters(name: str) -> None:
    assert SHAPES[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_is_counted_as_transformers_builds_it(family: str, tied: bool) -> None:
    import torch
    import transformers

    fields = SMALL | OWN.get(family, {}) | {"tie_word_embeddings": tied}
    model_class: Any = getattr(transformers, ARCHITECTURES[family])
    with torch.device("meta"):
        model = model_class(model_class.config_class(**fields))
    shape = shape_of({"model_type": family, **fields}, family)
    assert shape.parameters == sum(one.numel() for one in model.parameters())


def test_active_parameters_are_those_of_the_experts_used() -> None:
    assert SHAPES["qwen3-30b-a3b"].active_parameters == pytest.approx(3.35e9, rel=0.01)
    dense = SHAPES["qwen2.5-7b"]
    assert dense.active_parameters == dense.parameters


def test_an_adapter_has_rank_times_inputs_and_outputs() -> None:
    shape = shape_of({"model_type": "llama", **SMALL}, "small")
    sums = (32 + 64) + 2 * (32 + 32) + (64 + 32) + 2 * (32 + 48) + (48 + 32)
    assert shape.adapter_parameters(8) == 8 * 2 * sums


def test_a_model_is_found_by_folder_by_table_and_by_hub_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert find_shape(str(tmp_path)).hidden == 32
    assert find_shape("qwen2.5-7b") is SHAPES["qwen2.5-7b"]
    for hub, name in (
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3.1-405B", "llama-3.1-405b"),
    ):
        assert find_shape(hub) == replace(SHAPES[name], hub=hub)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        "unsloth/Qwen3-4B-unsloth-bnb-4bit",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        "mlx-community/Qwen3-4B-8bit",
    ],
)
def test_a_quantised_model_is_refused_before_it_is_downloaded(name: str) -> None:
    with pytest.raises(ConfigurationError, match="quantised weights"):
        find_shape(name)


def test_the_folder_of_a_quantised_model_is_refused(tmp_path: Path) -> None:
    fields = {"model_type": "llama", **SMALL, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigurationError, match="give the original checkpoint"):
        find_shape(str(tmp_path))


def test_an_unknown_model_names_the_nearest_and_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"nearest: qwen2.5-7b"):
        find_shape("qwen2-7b")
    with pytest.raises(ConfigurationError, match=r"model type 'mamba' are not counted"):
        shape_of({"model_type": "mamba"}, "m")
    with pytest.raises(ConfigurationError, match="no model_type, so it is no model's"):
        shape_of({"run": "quickstart"}, "runs/quickstart")
    with pytest.raises(ConfigurationError, match="has no 'hidden_size'"):
        shape_of({"model_type": "llama", "num_attention_heads": 2}, "m")
