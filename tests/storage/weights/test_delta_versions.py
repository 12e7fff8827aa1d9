"""Versions stored as differences: published, fetched, and moved to in place (invariant 6)."""

import pytest
import torch
from safetensors.torch import load as load_safetensors

from rollstream.errors import CorruptObject, ObjectMissing, StoreError
from rollstream.storage.starting_model.models import build_model, model_files
from rollstream.storage.weights.fetch import fetch_model_file, fetch_tensors
from rollstream.storage.weights.manifest import manifest_key, version_folder
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.versions import model_from_version, published_tensors
from tests.storage.storage_samples import TINY
from tests.storage.weights.version_samples import (
    FILES,
    History,
    assert_same,
    changed,
    first_tensors,
)


class CountingStore(MemoryStore):
    """Counts bytes of tensors that are read; fails at read number `fatal` of them."""

    def __init__(self):
        super().__init__()
        self.bytes_read, self.reads, self.fatal = 0, 0, -1

    def get(self, key, start=0, end=None):
        data = super().get(key, start, end)
        if key.endswith(".safetensors"):
            self.reads += 1
            self.bytes_read += len(data)
            if self.reads == self.fatal:
                raise ConnectionResetError("the store went away")
        return data


def test_a_delta_comes_back_bit_for_bit_on_every_store(store):
    history = History(store, shard_bytes=600)
    for _ in range(3):
        assert history.add().kind == "delta"
    for number, manifest in enumerate(history.manifests):
        got, tensors = fetch_tensors(store, manifest.version, manifest.hash)
        assert got == manifest
        assert_same(tensors, history.tensors[number])
        assert tensors["head"] is tensors["embed"]
    held = ResidentWeights()
    for number in (0, 1, 3, 2):
        held.update(store, history.version(number), history.manifests[number].hash)
        assert_same(held.tensors, history.tensors[number])


def test_new_removed_reshaped_untied_and_equal_tensors():
    history = History()
    tensors = changed(first_tensors(), 1)
    tensors["new"] = torch.ones(5)
    tensors["layer.weight"] = torch.zeros(8, 8)
    tensors["layer.count"] = first_tensors()["layer.count"]
    tensors["head"] = tensors["head"].clone()
    del tensors["scale"]
    delta = history.add(tensors).delta
    codings = {name: entry.coding for name, entry in delta.tensors.items()}
    assert codings["layer.count"] == "same"
    assert codings["new"] == codings["layer.weight"] == "dense"
    assert delta.tensors["new"].base == ""
    assert delta.tensors["head"].base == history.manifests[0].weights.entry("head").hash
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    held.update(history.store, history.version(1))
    assert_same(held.tensors, tensors)
    assert held.tensors["head"].data_ptr() != held.tensors["embed"].data_ptr()
    held.update(history.store, history.version(0))
    assert_same(held.tensors, first_tensors())


def test_a_version_equal_to_its_parent_has_no_file_at_all():
    history = History()
    manifest = history.add(first_tensors())
    assert manifest.files == ()
    assert_same(fetch_tensors(history.store, manifest.version)[1], first_tensors())


def test_a_deltas_files_are_safetensors_of_payloads_and_small():
    history = History(tensors={"a": torch.randn(200, 200), "b": torch.randn(100)})
    manifest = history.add()
    (file,) = manifest.delta.files
    data = history.store.get(f"{version_folder(manifest.version)}/{file.name}")
    payloads = load_safetensors(data)
    assert set(payloads) == {"a", "b"}
    assert {tensor.dtype for tensor in payloads.values()} == {torch.uint8}
    assert manifest.bytes < history.manifests[0].bytes / 5


def test_the_models_files_are_those_of_the_anchor():
    history = History()
    manifest = history.add()
    assert fetch_model_file(history.store, manifest, "config.json") == FILES["config.json"]
    assert [e.key for e in history.store.list(version_folder(manifest.version)) if "json" in e.key
            ] == [manifest_key(manifest.version)]  # fmt: skip


def test_a_model_is_built_from_a_delta():
    store, models = MemoryStore(), [build_model("Qwen3ForCausalLM", TINY, seed=3)]
    tensors = [published_tensors(models[0], torch.float32)]
    files = model_files(models[0], None, torch.float32)
    first = publish_version(
        store, NewVersion("run", Version(0, 1), tensors[0], files, 1 << 20, 0.0)
    )
    after = changed(tensors[0], 1)
    second = NewVersion("run", Version(1, 1), after, {}, 1 << 20, 0.0)
    publish_version(store, second, first, tensors[0], False)
    assert_same(dict(model_from_version(store, Version(1, 1)).state_dict()), after)


def test_publishing_a_delta_again_changes_nothing_and_other_content_is_refused():
    history = History()
    tensors = changed(history.tensors[0], 1)
    first = history.add(tensors)
    before = {entry.key: history.store.stat(entry.key) for entry in history.store.list()}
    args = history.manifests[0], history.tensors[0], False
    assert history.write(first.version, tensors, *args) == first
    assert {entry.key: history.store.stat(entry.key) for entry in history.store.list()} == before
    with pytest.raises(StoreError, match="exists with other content"):
        history.write(first.version, changed(history.tensors[0], 2), *args)


def test_an_anchor_with_its_delta_is_read_by_what_is_cheaper():
    history = History(store=CountingStore(), tensors={"a": torch.randn(400, 400)})
    manifest = history.add(anchor=True)
    assert manifest.kind == "anchor"
    assert manifest.delta is not None
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    moved = held.update(history.store, manifest.version)
    assert moved.fetched_bytes < manifest.full_bytes / 5
    history.store.delete(manifest_key(history.version(0)))
    assert_same(fetch_tensors(history.store, manifest.version)[1], history.tensors[1])


def test_an_anchor_leaves_a_large_delta_out():
    history = History(tensors={"a": torch.randn(100, 100)})
    assert history.add({"a": torch.randn(100, 100)}, anchor=True).delta is None


def test_a_reader_several_versions_behind_reads_the_deltas_and_gets_one_set_of_patches():
    history = History(
        store=CountingStore(), tensors={"a": torch.randn(300, 300), "b": torch.ones(7)}
    )
    for _ in range(4):
        history.add()
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    before = {name: tensor.clone() for name, tensor in held.tensors.items()}
    history.store.bytes_read = 0  # pyright: ignore[reportAttributeAccessIssue]
    moved = held.update(history.store, history.version(4))
    assert moved.base == history.version(0)
    assert moved.whole == ("b",) or {patch.name for patch in moved.patches} == {"a", "b"}  # pyright: ignore[reportOptionalIterable]
    assert moved.fetched_bytes == history.store.bytes_read  # pyright: ignore[reportAttributeAccessIssue]
    assert moved.fetched_bytes < history.manifests[0].full_bytes / 2
    for patch in moved.patches:  # pyright: ignore[reportOptionalIterable]
        assert torch.equal(patch.indices, patch.indices.unique())
        before[patch.name].view(-1)[patch.indices] = patch.values
        assert before[patch.name].shape == patch.shape
    for name in moved.whole:
        before[name] = held.tensors[name]
    assert_same(before, history.tensors[4])


def test_moves_change_the_tensors_where_they_are():
    history = History()
    history.add()
    held = ResidentWeights()
    assert held.tensors == {}
    first = held.update(history.store, history.version(0))
    assert (first.base, first.patches) == (None, None)
    places = {name: tensor.data_ptr() for name, tensor in held.tensors.items()}
    held.update(history.store, history.version(1))
    assert {name: tensor.data_ptr() for name, tensor in held.tensors.items()} == places
    again = held.update(history.store, history.version(1))
    assert (again.patches, again.whole, again.fetched_bytes) == ((), (), 0)


def test_only_the_wanted_tensors_are_read_and_held():
    tensors = {f"t{n}": torch.randn(200, 200) for n in range(5)}
    history = History(store=CountingStore(), tensors=tensors)
    history.add()
    held = ResidentWeights(["t1", "t3"])
    held.update(history.store, history.version(1))
    assert_same(held.tensors, {n: history.tensors[1][n] for n in ("t1", "t3")})
    assert history.store.bytes_read < 2.5 * 160_000  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ObjectMissing, match="no tensor zz"):
        fetch_tensors(history.store, history.version(1), tensors=["t1", "zz"])


@pytest.mark.parametrize("fatal", range(1, 5))
def test_a_move_that_fails_in_the_middle_holds_no_version_and_the_next_repairs_it(fatal):
    history = History(store=CountingStore(), shard_bytes=100)
    for _ in range(2):
        history.add()
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    history.store.fatal, history.store.reads = fatal, 0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConnectionResetError):
        held.update(history.store, history.version(2))
    assert held.version is None
    assert held.manifest is None
    history.store.fatal = -1  # pyright: ignore[reportAttributeAccessIssue]
    moved = held.update(history.store, history.version(2))
    assert (moved.base, moved.patches) == (None, None)
    assert_same(held.tensors, history.tensors[2])


def test_a_move_that_cannot_begin_leaves_what_is_held():
    history = History()
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    with pytest.raises(ObjectMissing):
        held.update(history.store, Version(7, 1))
    with pytest.raises(CorruptObject, match="announced"):
        held.update(history.store, history.version(0), "0" * 32)
    assert held.version == history.version(0)
    assert_same(held.tensors, history.tensors[0])


def test_memory_that_changed_underneath_is_found_and_read_again(caplog):
    history = History()
    history.add()
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    held.tensors["layer.weight"][5, 5] += 3.0
    held.update(history.store, history.version(1))
    assert_same(held.tensors, history.tensors[1])
    assert "layer.weight" in caplog.text


def flip(store, manifest, name):
    entry = manifest.delta.tensors[name]
    key = f"{version_folder(manifest.version)}/{entry.file}"
    data = bytearray(store.get(key))
    data[entry.end - 1] ^= 1
    store.put(key, data)
    return key


def test_a_flipped_bit_in_a_payload_is_refused_by_the_name_of_its_tensor():
    history = History()
    key = flip(history.store, history.add(), "layer.weight")
    with pytest.raises(CorruptObject, match=f"layer.weight in object {key}"):
        fetch_tensors(history.store, history.version(1))
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    with pytest.raises(CorruptObject, match=r"layer\.weight"):
        held.update(history.store, history.version(1))
    assert held.version is None
    held.update(history.store, history.version(0))
    assert_same(held.tensors, history.tensors[0])


def test_a_damaged_delta_beside_an_anchor_is_read_from_the_anchor(caplog):
    history = History(tensors={"a": torch.randn(100, 100), "b": torch.randn(50, 50)})
    flip(history.store, history.add(anchor=True), "a")
    held = ResidentWeights()
    held.update(history.store, history.version(0))
    moved = held.update(history.store, history.version(1))
    assert_same(held.tensors, history.tensors[1])
    assert moved.whole == ("a",)
    assert "tensor a in object" in caplog.text


def test_a_delta_is_never_applied_to_another_base():
    """A zombie's version of the same number has another hash, so its reader starts from the
    anchor.
    """
    history = History()
    history.add()
    zombie = changed(history.tensors[0], seed=99)
    args = history.manifests[0], history.tensors[0], False
    history.write(Version(1, 7), zombie, *args)
    history.add()
    held = ResidentWeights()
    held.update(history.store, Version(1, 7))
    assert_same(held.tensors, zombie)
    held.update(history.store, history.version(2))
    assert_same(held.tensors, history.tensors[2])


def test_a_parent_that_is_not_the_one_the_delta_was_made_from_is_refused():
    history = History()
    history.add()
    history.add()
    parent = manifest_key(history.version(1))
    history.store.put(
        parent, history.store.get(parent).replace(b'"created_s": 0.0', b'"created_s": 1.0')
    )
    with pytest.raises(CorruptObject, match="announced"):
        fetch_tensors(history.store, history.version(2))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b'"kind": "delta"', b'"kind": "anchor"', "without tensor"),
        (b'"number": 0', b'"number": 1', "not an earlier version"),
        (b'"BF16"', b'"BF17"', "BF17"),
        (b'"F32"', b'"F64"', "bytes, not F64"),
        (b'"head": "embed"', b'"head": "zzzzz"', "names no tensor"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(old, new, expected):
    history = History()
    key = manifest_key(history.add().version)
    assert old in history.store.get(key)
    history.store.put(key, history.store.get(key).replace(old, new))
    with pytest.raises(CorruptObject, match=expected):
        fetch_tensors(history.store, history.version(1))
