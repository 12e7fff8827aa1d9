"""Files beside a model are no part of it, and two loaders read one folder alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load_layers, validate_layers
from rollstream.run.config.run_model import source_in
from rollstream.storage.model_folder.hf_folder import small_files
from rollstream.storage.model_folder.hf_weights import (
    check_trainable,
    read_weight_files,
    unread_files,
)
from rollstream.storage.model_folder.lora_folder import adapter_settings
from rollstream.storage.model_folder.model_fit import check_fit
from rollstream.storage.starting_model.manifest import MODEL_KEY, ModelSource, describe_model
from rollstream.storage.starting_model.models import build_model, load_empty_model, load_model
from rollstream.storage.starting_model.put import check_same_model, put_model
from rollstream.storage.stores.json_objects import encode_json
from testbed.memory import MemoryStore
from testbed.model_folders.weight_folders import llama, write_weights
from tests.model_folder.test_models_refused import change_config

STRAY = (
    "config (1).json",
    "training log.txt",
    "说明.txt",
    "notes.txt",
    "trainer_state.json",
    "manifest.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_weights(path, llama(is_tied=False))
    return path


def test_stray_files_are_named_and_never_stored(folder: Path) -> None:
    for name in STRAY:
        (folder / name).write_text("{}")
    (folder / "vocab.txt").write_text("a")
    assert not set(STRAY) & small_files(folder).keys()
    assert "vocab.txt" in small_files(folder)
    assert set(STRAY) <= set(unread_files(folder))
    store = MemoryStore()
    manifest = put_model(store, "run", ModelSource(folder), 0.0)
    (folder / "notes.txt").write_text("changed")
    check_same_model(manifest, ModelSource(folder))
    (folder / "vocab.txt").write_text("b")
    with pytest.raises(ConfigurationError, match=r"vocab\.txt differs"):
        check_same_model(manifest, ModelSource(folder))


def test_a_home_folder_in_a_path_is_stored_as_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = folder.parent
    monkeypatch.setenv("HOME", str(home))
    (home / "rows.jsonl").write_text('{"prompt": "a", "reference": "b"}\n')
    settings = ["task.name=dataset", "task.options.path='~/rows.jsonl'", "task.tokenizer='~/model'",
                "model.path=unread", "task.options.verifier=a:b"]  # fmt: skip
    source = source_in(validate_layers(load_layers(None, settings, {})), folder, "~/model")
    assert (source.tokenizer, source.task_files) == ("~/model", ("~/rows.jsonl",))
    assert source.files()["task/0.jsonl"] == home / "rows.jsonl"


def test_a_model_that_an_earlier_release_stored_stays_the_runs_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a file that no role reads, a table under another name, and no file of `~`."""
    monkeypatch.setenv("HOME", str(folder.parent))
    table, lines = folder.parent / "rows.csv.gz", folder.parent / "rows.jsonl"
    table.write_bytes(b"1")
    lines.write_text("{}")
    now = ModelSource(folder, None, (str(table), "~/rows.jsonl"))
    before = describe_model(now, "run", 0.0)
    kept = [
        replace(entry, name="task/0.gz") if entry.name == "task/0.csv.gz" else entry
        for entry in before.files
        if entry.name != "task/1.jsonl"
    ]
    older = replace(
        before,
        digest="0123456789abcdef",
        files=(*kept, replace(before.files[0], name="notes.txt")),
        task_files={str(table): "task/0.gz"},
    )
    store = MemoryStore()
    store.create(MODEL_KEY, encode_json(older))
    assert put_model(store, "run", now, 1.0) == older
    table.write_bytes(b"2")
    with pytest.raises(ConfigurationError, match="another model"):
        put_model(store, "run", now, 1.0)


@pytest.mark.parametrize(
    "fields",
    [{"attn_implementation": "flash_attention_2"}, {"_attn_implementation": "flash_attention_3"}],
)
def test_the_attention_of_another_machine_is_not_taken(
    folder: Path, fields: dict[str, Any]
) -> None:
    change_config(folder, **fields)
    check_fit(folder)
    assert torch.isfinite(load_model(str(folder))(torch.tensor([[1, 2]])).logits).all()
    assert load_empty_model(str(folder)) is not None


def test_a_configuration_that_cannot_be_built_is_a_sentence(folder: Path) -> None:
    change_config(folder, pad_token_id=100_000)
    for read in (check_fit, lambda path: load_model(str(path)),
                 lambda path: load_empty_model(str(path))):  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"cannot be loaded: .*[Pp]adding"):
            read(folder)


def test_a_field_of_quantisation_without_a_value_says_nothing(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": None}))
    assert check_trainable(folder)["quantization_config"] is None


def test_both_loaders_read_the_settings_of_generation(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_bytes(b'\xef\xbb\xbf{"eos_token_id": [2, 5], "temperature": 0.5}')
    empty = load_empty_model(str(folder))
    assert empty is not None
    for model in (load_model(str(folder)), empty[0]):
        assert model.generation_config.eos_token_id == [2, 5]
        assert model.generation_config.temperature == 0.5
    path.write_text('{"eos_token_id": [2')
    for read in (load_model, load_empty_model):
        with pytest.raises(ConfigurationError, match=r"generation_config\.json cannot be read"):
            read(str(folder))


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_head_of_another_type_is_compared_by_its_numbers(
    folder: Path, is_equal: bool
) -> None:
    change_config(folder, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    rounded = tensors["model.embed_tokens.weight"].bfloat16()
    tensors["model.embed_tokens.weight"] = rounded.float()
    tensors["lm_head.weight"] = rounded if is_equal else rounded + 1
    save_file(tensors, path, metadata={"format": "pt"})
    if is_equal:
        read_weight_files(folder)
        return
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight that differs"):
        read_weight_files(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("alora_invocation_tokens", [5, 6]),
        ("layer_replication", [[0, 1]]),
        ("lora_bias", True),
        ("kasa_config", {"a": 1}),
    ],
)
def test_an_adapter_that_changes_its_base_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    plain: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain, "init_lora_weights": True}))
    assert adapter_settings(str(tmp_path)).rank == 4
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain, field: value}))
    with pytest.raises(ConfigurationError, match=f"{field} = .* is not trained here"):
        adapter_settings(str(tmp_path))


def test_a_new_model_takes_the_defaults_that_its_class_has() -> None:
    own: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 16}
    defaults = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
    model = build_model("GPT2LMHeadModel", own, 0, defaults)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 1)
    with pytest.raises(ConfigurationError, match="no field 'intermediate_size'"):
        build_model("GPT2LMHeadModel", own | defaults, 0)
