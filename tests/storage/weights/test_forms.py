"""What every `VersionForm` promises, in the policy's weight stream and in a named one: whole
weights, adapters, and the smallest form that keeps it (`Anchors`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.storage.model_folder.lora import (
    adapter_state,
    attach_adapters,
    attached_adapter,
    base_state,
)
from rollstream.storage.settings import LoraSettings, WeightsSettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights import form
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.form import (
    FORMS,
    FormPublisher,
    Publication,
    VersionForm,
    form_of,
    form_of_tensors,
)
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.named_streams import POLICY, WeightStream
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.storage.weights.tensors import Tensors
from rollstream.streams.values import Version
from testbed.memory import MemoryStore

CONFIG = Qwen3Config(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    tie_word_embeddings=False,
)  # fmt: skip


class Anchors(VersionForm):
    """Stores every version completely."""

    def publisher(self, publication: Publication) -> "AnchorPublisher":
        return AnchorPublisher(publication)


@dataclass
class AnchorPublisher(FormPublisher):
    p: Publication

    def publish(
        self, version: Version, tensors: Tensors, parent: Manifest | None, is_fork: bool = False
    ) -> Manifest:
        now_s = self.p.clock()
        new = NewVersion(
            self.p.run, version, tensors, self.p.model_files, 1 << 20, now_s, self.p.leads
        )
        return publish_version(self.p.store, new, parent)


class AnchorTensors(dict[str, torch.Tensor]):
    form = "anchors"


def model() -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(CONFIG).to(torch.bfloat16)  # pyright: ignore[reportArgumentType]


def state_of(number: int) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in model().state_dict().items()}
    for tensor in tensors.values():
        tensor.view(-1)[::17] += 0.25 * number
    return tensors


def adapter_of(number: int) -> AdapterTensors:
    adapted = model()
    attach_adapters(adapted, LoraSettings(rank=2), 0, torch.bfloat16, "base")
    state = {name: tensor.bfloat16() for name, tensor in adapted.named_parameters()}
    adapter = attached_adapter(adapted)
    assert adapter is not None
    factors = {name: factor + 0.01 * number for name, factor in adapter_state(state).items()}
    return AdapterTensors(factors, adapter.config, adapter.scaling, lambda: base_state(state))


MADE: Mapping[str, Callable[[int], Any]] = {
    "whole": state_of,
    "adapter": adapter_of,
    "anchors": lambda number: AnchorTensors(state_of(number)),
}


@pytest.fixture(params=MADE)
def tensors_of(request: pytest.FixtureRequest, monkeypatch) -> Callable[[int], Any]:
    monkeypatch.setattr(form, "FORMS", {**FORMS, "anchors": f"{__name__}:Anchors"})
    return MADE[request.param]


@pytest.fixture(params=[POLICY, WeightStream("draft")], ids=["policy", "named"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    return request.param.part(MemoryStore())


def publisher_of(store: ObjectStore, tensors: Tensors) -> FormPublisher:
    publication = Publication(store, "r", WeightsSettings(), {}, lambda: 1.0, leads=True)
    return form_of_tensors(tensors).publisher(publication)


def published(store: ObjectStore, publisher: FormPublisher, tensors: list[Any]) -> list[Manifest]:
    manifests: list[Manifest] = []
    for number, each in enumerate(tensors):
        parent = manifests[-1] if manifests else None
        manifests.append(publisher.publish(Version(number, 1), each, parent))
        publisher.believed(manifests[-1], each)
    return manifests


def test_a_version_has_the_tensors_that_were_published(store: ObjectStore, tensors_of) -> None:
    made = [tensors_of(number) for number in range(3)]
    for manifest, tensors in zip(
        published(store, publisher_of(store, made[0]), made), made, strict=True
    ):
        read, fetched = fetch_tensors(store, manifest.version)
        assert read == manifest == read_manifest(store, manifest.version, manifest.hash)
        assert fetched.keys() == tensors.keys()
        assert all(torch.equal(fetched[name], tensors[name]) for name in tensors)


def test_a_publish_that_was_killed_is_repeated_and_finds_its_objects(
    store: ObjectStore, tensors_of
) -> None:
    made = [tensors_of(number) for number in range(3)]
    manifests = published(store, publisher_of(store, made[0]), made)
    present = {key: store.get(key) for key in keys(store)}
    again = publisher_of(store, made[2]).publish(Version(2, 1), made[2], manifests[1])
    assert again == manifests[2]
    assert {key: store.get(key) for key in keys(store)} == present


def test_after_other_bytes_the_next_version_does_not_need_the_believed_one(
    store: ObjectStore, tensors_of
) -> None:
    made = [tensors_of(number) for number in range(3)]
    publisher = publisher_of(store, made[0])
    manifests = published(store, publisher, made[:2])
    manifest = publisher.publish(Version(2, 1), made[2], manifests[1], is_fork=True)
    assert manifest.kind != "delta"
    store.delete_all([key for key in keys(store) if f"/{Version(1, 1)}/" in key])
    assert all(
        torch.equal(tensor, made[2][name])
        for name, tensor in fetch_tensors(store, Version(2, 1))[1].items()
    )


def test_an_engine_opens_and_serves_the_version(store: ObjectStore, tensors_of) -> None:
    made = tensors_of(1)
    (manifest,) = published(store, publisher_of(store, made), [made])
    own = fetch_tensors(store, manifest.version)[1]
    opening = form_of(manifest).opening(store, manifest, own)
    engine = TorchEngine(
        CONFIG, opening.tensors, opening.version, EngineOptions(2, 32, adapter_rank=2)
    )
    if opening.version != manifest.version:
        scaling = form_of(manifest).scaling(manifest)
        engine.update(WeightUpdate(manifest.version, own, scaling=scaling), "in_flight")
    assert engine.version == manifest.version
    assert not engine.read_back(own, own).differing


def test_the_version_as_one_model_has_the_model_s_tensors(store: ObjectStore, tensors_of) -> None:
    made = tensors_of(1)
    (manifest,) = published(store, publisher_of(store, made), [made])
    own = fetch_tensors(store, manifest.version)[1]
    whole = form_of(manifest).model_tensors(store, manifest, own)
    assert whole.keys() == model().state_dict().keys()
    assert form_of(manifest).is_partial == (whole.keys() != own.keys())


def keys(store: ObjectStore) -> list[str]:
    return [listed.key for listed in store.list("")]
