"""Versions of an adapter: PEFT folders over a stored base, which PEFT and transformers load."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.lora import attached_adapter, base_state
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.weights.adapters import BASE, AdapterTensors
from rollstream.storage.weights.fetch import export_version, fetch_tensors
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.retention import stored_versions
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus, MemoryStore
from testbed.versions import model_from_version
from tests.support.adapted_models import adapted, adapter_of, merged
from tests.support.engine_samples import prompt, tiny_model

V1 = Version(1, 1)


@pytest.fixture
def store():
    return MemoryStore()


def tensors_of(model, dtype=torch.float32):
    own = attached_adapter(model)
    assert own is not None
    base = {name: tensor.to(dtype) for name, tensor in base_state(model.state_dict()).items()}
    adapter = {name: tensor.to(dtype) for name, tensor in adapter_of(model).items()}
    return AdapterTensors(adapter, own.config, own.scaling, lambda: base)


def writer(store, model, term=1, **settings):
    bus = MemoryBus()
    bus.create(catalogue())
    files = {"config.json": model.config.to_json_string(use_diff=False).encode()}
    fenced = FencedWriter(bus, "weights", "trainer", term)
    made = VersionWriter(store, fenced, "run", term, WeightsSettings(**settings), files, set)
    made.open()
    return made


def logits(model):
    with torch.inference_mode():
        return model(torch.tensor([prompt(9).tolist()])).logits


def test_a_version_is_the_adapter_alone_and_names_its_base(store):
    plain = tiny_model("qwen3")
    versions = writer(store, plain)
    for number in range(3):
        versions.publish(number, tensors_of(adapted(plain, seed=number)))
    base = read_manifest(store, BASE)
    for number in range(3):
        manifest = read_manifest(store, Version(number, 1))
        assert manifest.adapter
        named = manifest.kind, manifest.anchor, manifest.adapter.base_hash
        assert named == ("adapter", BASE, base.hash)
        assert {f.name for f in manifest.files} == {
            "adapter_config.json", "adapter_model.safetensors",
        }  # fmt: skip
        assert verify_version(store, manifest.version)[1] == ""
        expected = adapter_of(adapted(plain, seed=number))
        found = fetch_tensors(store, manifest.version)[1]
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_version_has_few_bytes_beside_its_tensors(store):
    plain = tiny_model("qwen3")
    tensors = tensors_of(adapted(plain), torch.bfloat16)
    writer(store, plain).publish(0, tensors)
    manifest = read_manifest(store, Version(0, 1))
    headers = 150 * len(tensors) + 1000
    assert manifest.bytes < 2 * sum(t.numel() for t in tensors.values()) + headers


def test_retention_keeps_the_base(store):
    plain = tiny_model("qwen3")
    versions = writer(store, plain, versions_max=3)
    for number in range(6):
        versions.publish(number, tensors_of(adapted(plain, seed=number)))
        versions.retain()
    kept = [stored.version for stored in stored_versions(store)]
    assert kept == [BASE, Version(4, 1), Version(5, 1)]
    assert verify_version(store, Version(5, 1))[1] == ""


def test_a_later_trainer_continues_over_the_same_base_only(store):
    plain = tiny_model("qwen3")
    writer(store, plain).publish(0, tensors_of(adapted(plain)))
    later = writer(store, plain, term=2)
    later.publish(1, tensors_of(adapted(plain, seed=1)))
    assert read_manifest(store, Version(1, 2)).parent == Version(0, 1)
    another = writer(store, plain, term=3)
    with pytest.raises(ConfigurationError, match="differs from the base"):
        another.publish(2, tensors_of(adapted(tiny_model("qwen3", seed=1))))


def test_a_repeated_step_is_recognised_by_its_bits(store):
    plain = tiny_model("qwen3")
    versions = writer(store, plain)
    tensors = tensors_of(adapted(plain))
    versions.publish(0, tensors)
    assert versions.publish(0, tensors) == Version(0, 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_exported_adapter_is_loaded_by_peft_and_the_merged_one_by_transformers(
    store, tmp_path: Path, family: str
) -> None:
    plain = tiny_model(family)
    model = adapted(plain)
    writer(store, plain).publish(1, tensors_of(model))
    wanted = logits(model)
    torch.testing.assert_close(logits(merged(model, plain)), wanted, atol=1e-5, rtol=0)
    whole = export_version(store, V1, tmp_path / "whole", 1 << 30)
    loaded = AutoModelForCausalLM.from_pretrained(whole.folder, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), wanted, atol=1e-5, rtol=1e-5)
    again = model_from_version(store, V1)
    torch.testing.assert_close(logits(again.eval()), wanted, atol=1e-5, rtol=1e-5)
    import peft  # seconds

    alone = export_version(store, V1, tmp_path / "adapter", 1 << 30, merged=False)
    own = peft.PeftModel.from_pretrained(tiny_model(family), str(alone.folder))
    torch.testing.assert_close(logits(own), wanted, atol=1e-5, rtol=1e-5)
    config = json.loads((alone.folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
