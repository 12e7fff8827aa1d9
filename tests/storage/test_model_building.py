"""Models from settings, folders and versions."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollstream.errors import ConfigurationError
from rollstream.storage.starting_model.models import (
    build_model,
    load_empty_model,
    load_model,
    model_files,
)
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.manifest import version_folder
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.versions import model_from_version, published_tensors
from tests.storage.storage_samples import TINY

VERSION = Version(3, 1)


def put_version(store, model, dtype=torch.float32, drop=()):
    tensors = published_tensors(model, dtype)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    files = model_files(model, None, dtype)
    return publish_version(store, NewVersion("run", VERSION, tensors, files, 1 << 20, 0.0))


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_equal_seeds_give_equal_models_and_leave_the_global_generator_alone(tiny_model):
    before = torch.get_rng_state()
    assert same_weights(build_model("Qwen3ForCausalLM", TINY, seed=3), tiny_model)
    assert not same_weights(build_model("Qwen3ForCausalLM", TINY, seed=4), tiny_model)
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in tiny_model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"]
)
def test_a_version_of_other_architectures_builds_again(architecture):
    if architecture == "GPT2LMHeadModel":
        config = {"vocab_size": 19, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    else:
        config = {name: TINY[name] for name in TINY if name != "head_dim"}
    model = build_model(architecture, config, seed=0)
    store = MemoryStore()
    put_version(store, model)
    assert same_weights(model_from_version(store, VERSION), model)


def test_a_bf16_version_builds_as_fp32_with_tied_weights(tiny_model):
    store = MemoryStore()
    manifest = put_version(store, tiny_model, torch.bfloat16)
    model = model_from_version(store, VERSION, manifest.hash)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rounded = tiny_model.lm_head.weight.to(torch.bfloat16).float()
    assert torch.equal(model.lm_head.weight, rounded)


def test_a_checkpoint_folder_loads_and_anything_else_is_refused(tmp_path, tiny_model):
    put_version(FileStore(tmp_path), tiny_model, torch.bfloat16)
    model = load_model(str(tmp_path / version_folder(VERSION)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for path in ("some/hub-name", str(tmp_path)):
        with pytest.raises(ConfigurationError, match="not a local checkpoint folder"):
            load_model(path)


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("Qwen3ForCausalLn", {}, "did you mean 'Qwen3ForCausalLM'"),
        ("AutoModelForCausalLM", {}, "no causal language model"),
        ("Qwen3Config", {}, "no causal language model"),
        ("Qwen3ForCausalLM", {"hidden_sise": 8}, "did you mean 'hidden_size'"),
        ("Qwen3ForCausalLM", {"hidden_size": "big"}, "hidden_size"),
    ],
)
def test_wrong_settings_name_the_nearest_right_one(architecture, config, expected):
    with pytest.raises(ConfigurationError, match=expected):
        build_model(architecture, config, seed=0)


@pytest.mark.parametrize("shard_bytes", ["1KB", "1GB"])
def test_an_empty_model_has_its_buffers_and_reads_any_rows_of_its_parameters(
    tmp_path, tiny_model, shard_bytes
):
    tiny_model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard_bytes)
    whole = load_model(str(tmp_path))
    found = load_empty_model(str(tmp_path))
    assert found is not None
    model, rows = found
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert type(model) is type(whole)
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, buffer), wanted in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer, wanted), name
    for name, parameter in whole.named_parameters():
        count = parameter.shape[0]
        assert torch.equal(rows.rows(name, 0, count), parameter)
        assert torch.equal(
            rows.rows(name, count // 3, count // 2), parameter[count // 3 : count // 2]
        )
    assert rows.identity() == load_empty_model(str(tmp_path))[1].identity()  # pyright: ignore[reportOptionalSubscript]


def test_an_empty_model_needs_a_checkpoint_of_the_models_own_names_and_shapes(tmp_path, tiny_model):
    tiny_model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.norm.weight"
    for changed in ({name: torch.ones(3)}, {}):
        save_file({n: t for n, t in (tensors | changed).items() if changed or n != name}, path,
                  metadata={"format": "pt"})  # fmt: skip
        assert load_empty_model(str(tmp_path)) is None
    path.write_bytes(b"x" * 100)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors cannot be read"):
        load_empty_model(str(tmp_path))


@pytest.mark.parametrize("load", [load_model, load_empty_model])
def test_a_wrong_value_of_the_models_configuration_is_refused_by_name(tmp_path, tiny_model, load):
    tiny_model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": "x"}))
    with pytest.raises(
        ConfigurationError, match=r"model\.path: .* cannot be loaded: .*hidden_size"
    ):
        load(str(tmp_path))
