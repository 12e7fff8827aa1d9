"""`check`, `put-model` and the loader refuse a model that no role can use, with one text."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.run.checks.model import read_model_facts
from rollstream.run.checks.model_process import ModelOrder, refusal
from rollstream.run.checks.own_parts import check_own_parts
from rollstream.run.checks.task import task_order
from rollstream.run.config.config import load_layers, validate_layers
from rollstream.run.config.run_model import missing_model
from rollstream.run.config.settings import Configuration
from rollstream.storage.starting_model.models import load_model
from rollstream.storage.weights.fetch import export_version
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.model_folders.weight_folders import SIZES, gpt2, llama, write_weights

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    changed = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def ordered(folder: Path, engine: str = "torch", is_adapted: bool = False) -> str:
    return refusal(ModelOrder(str(folder), engine, is_adapted), lambda: 32)


def configured(path: object) -> Configuration:
    return Configuration.model_validate({"model": {"path": str(path)}})


BROKEN: dict[str, tuple[Any, dict[str, object], str]] = {
    "no type": (None, {"model_type": None}, "has no model_type"),
    "unknown type": (None, {"model_type": "hyper"}, "does not have"),
    "own code": (None, {"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}, "never run"),
    "FSDP2": (None, {"architectures": ["FSDPLlamaForCausalLM"]}, "write 'LlamaForCausalLM' there"),
    "classifier": (None, {"architectures": ["LlamaForSequenceClassification"]}, "another kind"),
    "lacks a tensor": (lambda t: t.pop("model.norm.weight"), {}, "has no model.norm.weight"),
    "other shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(8)}), {}, "the shape [8]",
    ),
    "more layers": (None, {"num_hidden_layers": 3}, "has no model.layers.2."),
    "fewer layers": (None, {"num_hidden_layers": 1}, "states fewer layers"),
    "heads that do not divide": (None, {"num_attention_heads": 3}, "multiple"),
    "odd heads": (None, {"head_dim": 9}, "even rotary dimension"),
    "vocabulary": (None, {"vocab_size": 100}, "with [100, 16]"),
    "not finite": (lambda t: t["model.norm.weight"].fill_(float("nan")), {}, "not finite"),
    "integers": (
        lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}), {}, "type I8",
    ),
    "eight bits": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}), {},
        "type F8_E4M3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_used_is_refused_by_name(name: str, tmp_path):
    change, fields, text = BROKEN[name]
    write_weights(tmp_path, llama(False), change or (lambda tensors: None))
    change_config(tmp_path, **fields)
    refused = ordered(tmp_path, "vllm")
    assert text in refused
    assert not {"trust_remote_code", "ignore_mismatched_sizes"} & set(refused.split())
    if name not in ("fewer layers", "not finite"):  # which only the check and the engines see
        with pytest.raises(ConfigurationError) as error:
            load_model(str(tmp_path))
        assert text in str(error.value)


UNSERVED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "encoder": (
        lambda: BertForMaskedLM(BertConfig(**SMALL, num_hidden_layers=1, intermediate_size=16)),
        "'BertForMaskedLM'",
    ),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "'t5', which is no causal language model",
    ),
    "no cache argument": (
        lambda: MptForCausalLM(MptConfig(vocab_size=64, d_model=16, n_heads=2, n_layers=1)),
        "does not take past_key_values",
    ),
    "window": (
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SIZES, head_dim=8, sliding_window=16, layer_types=["sliding_attention"] * 2
            )
        ),
        "set rollouts.context_max (now 32) to at most 16",
    ),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_a_model_that_the_engine_would_refuse_is_refused_by_the_check(name: str, tmp_path):
    build, text = UNSERVED[name]
    build().save_pretrained(tmp_path)
    assert text in ordered(tmp_path)


def test_a_healthy_model_is_served_and_adapters_only_where_the_engine_has_them(tmp_path):
    write_weights(tmp_path / "llama", llama(True), dtype=torch.bfloat16)
    write_weights(tmp_path / "gpt2", gpt2(True))
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)).save_pretrained(
        tmp_path / "moe"
    )
    assert ordered(tmp_path / "llama", is_adapted=True) == ""
    assert ordered(tmp_path / "moe") == ""
    assert ordered(tmp_path / "gpt2") == ""
    assert "model.lora" in ordered(tmp_path / "gpt2", is_adapted=True)


def test_the_default_context_follows_the_positions_of_every_family(tmp_path):
    write_weights(tmp_path, gpt2(True))
    (tmp_path / "run.toml").write_text(f"[model]\npath = '{tmp_path}'\n")
    fitted = validate_layers(load_layers(tmp_path / "run.toml", []))
    assert fitted.rollouts.context_max == 32
    with pytest.raises(ConfigurationError, match="context_max must be ≤ what the model takes"):
        validate_layers(load_layers(tmp_path / "run.toml", ["rollouts.context_max=64"]))


@pytest.mark.parametrize(
    ("architecture", "targets", "text"),
    [
        (
            "Qwen3ForCausalLM",
            ("query",),
            "model.lora.targets: Qwen3ForCausalLM has no linear",
        ),
        (
            "GemmaForCausalLM",
            ("all-linear",),
            "engine .torch. cannot serve Gemma",
        ),
        ("Qwen3ForCausalLM", ("q_proj",), ""),
    ],
)
def test_the_adapter_of_a_new_model_is_tried(
    architecture: str, targets: tuple[str, ...], text: str
):
    c = Configuration.model_validate(
        {"model": {"architecture": architecture, "lora": {"rank": 2, "targets": targets}}}
    )
    parts = task_order(c, frozenset(), False).parts
    if not text:
        check_own_parts(parts, load_task(TaskSettings()))
        return
    with pytest.raises(ConfigurationError, match=text):
        check_own_parts(parts, load_task(TaskSettings()))


def _hub(folder: Path) -> None:
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")


INSTEAD: dict[str, tuple[Any, str]] = {
    "a file": (lambda folder: folder.write_text("x"), "is a file"),
    "nothing in it": (lambda folder: folder.mkdir(), "has no config.json"),
    "adapter": (
        lambda folder: (
            folder.mkdir(),
            (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}'),
        ),
        "without its base: name it as model.lora.path, and its base (org/base) as model.path",
    ),
    "gguf": (lambda folder: (folder.mkdir(), (folder / "q4.gguf").write_bytes(b"GGUF")), "GGUF"),
    "hub cache": (_hub, "give its snapshot"),
    "dead link": (lambda folder: folder.symlink_to("gone"), "does not exist"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_stands_in_the_place_of_a_checkpoint_is_named(name: str, tmp_path):
    write, text = INSTEAD[name]
    write(tmp_path / "model")
    for error in (missing_model(configured(tmp_path / "model")), _loading(tmp_path / "model")):
        assert text in str(error)
        assert "hf download" not in str(error)


def _loading(folder: Path) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as error:
        load_model(str(folder))
    return error.value


def test_weights_under_other_names_are_named(tmp_path):
    write_weights(tmp_path, llama(False), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    assert "has no weight_map" in str(_loading(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "but no model.safetensors.index.json" in str(_loading(tmp_path))
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    os.symlink("/gone/blob", tmp_path / "model.safetensors")
    assert "is a link to /gone/blob, which does not exist" in str(_loading(tmp_path))


SIDE_FILES = {
    "chat_template.jinja": ("ä{{ messages }}".encode("latin-1"), "not UTF-8"),
    "tokenizer_config.json": (b"[1]", "must hold a JSON object"),
    "special_tokens_map.json": (b'{"eos_token": 7}', "eos_token must be the text of a token"),
}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_a_broken_file_beside_the_tokenizer_is_named_by_the_check(name: str, tmp_path):
    content, text = SIDE_FILES[name]
    write_weights(tmp_path, llama(False))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=text) as error:
        read_model_facts(configured(tmp_path))
    assert name in str(error.value)


def test_an_exported_configuration_states_the_type_of_the_tensors(tmp_path):
    store, version = MemoryStore(), Version(1, 1)
    tensors = {"w": torch.ones(4, 4, dtype=torch.bfloat16), "norm": torch.ones(4)}
    files = {"config.json": b'{"model_type": "llama", "torch_dtype": "float32"}'}
    publish_version(store, NewVersion("run", version, tensors, files, 1 << 20, 0.0))
    done = export_version(store, version, tmp_path / "export", 1 << 20)
    stated = json.loads((done.folder / "config.json").read_bytes())
    assert stated == {"model_type": "llama", "dtype": "bfloat16"}
