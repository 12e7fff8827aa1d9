"""Weight versions: published, believed, fetched; invariant 6."""

import json

import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM

from rollstream.errors import (
    ConfigurationError,
    CorruptObject,
    Fenced,
    ObjectMissing,
    StoreError,
    SwapLost,
)
from rollstream.storage.starting_model.models import model_files
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.fetch import fetch_model_file, fetch_tensors
from rollstream.storage.weights.manifest import manifest_key, parse_version, version_folder
from rollstream.storage.weights.pointer import (
    POINTER_KEY,
    advance_pointer,
    believed_pointer,
    read_pointer,
    take_pointer,
)
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.storage.weights.shards import pack_tensors, plan_ranges, plan_shards
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.versions import published_tensors

V1, V2 = Version(1, 1), Version(2, 1)


def some_tensors(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(7, 5, generator=draw),
        "b.bias": torch.randn(3, generator=draw).to(torch.bfloat16),
        "c.scale": torch.tensor(1.5, dtype=torch.float16),
        "d.empty": torch.empty(0, 4),
        "e.count": torch.arange(6).reshape(2, 3),
        "f.mask": torch.tensor([True, False, True]),
        "g.nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def published(store, version=V1, tensors=None, shard_bytes=1 << 20, parent=None, now_s=1.0):
    files = {"config.json": b"{}"}
    tensors = some_tensors() if tensors is None else tensors
    return publish_version(
        store, NewVersion("run", version, tensors, files, shard_bytes, now_s), parent
    )


def at(version):
    """The manifest of such a version, of another store."""
    return published(MemoryStore(), version)


def assert_equal_bits(got, want):
    assert set(got) == set(want)
    for name in want:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape), name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got[name], want[name])]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("shard_bytes", [1, 64, 1 << 20])
def test_every_tensor_comes_back_bit_for_bit_from_any_number_of_shards(store, shard_bytes):
    manifest = published(store, shard_bytes=shard_bytes)
    got, tensors = fetch_tensors(store, V1, manifest.hash)
    assert got == manifest
    assert_equal_bits(tensors, some_tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_transformers_loads_a_version_folder_as_it_is(tmp_path, tiny_model, dtype):
    tensors = published_tensors(tiny_model, dtype)
    files = model_files(tiny_model, None, dtype)
    publish_version(FileStore(tmp_path), NewVersion("run", V1, tensors, files, 4000, 0.0))
    folder = tmp_path / version_folder(V1)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert loaded.dtype == dtype
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_equal_bits(loaded.state_dict(), tensors)


def test_tied_weights_are_stored_once_and_fetched_under_both_names(store, tiny_model):
    tensors = published_tensors(tiny_model, torch.bfloat16)
    manifest = published(store, tensors=tensors)
    assert manifest.weights.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in manifest.weights.tensors
    _, got = fetch_tensors(store, V1)
    assert got["lm_head.weight"] is got["model.embed_tokens.weight"]
    assert_equal_bits(got, tensors)


def test_equal_but_separate_tensors_are_not_tied(store):
    manifest = published(store, tensors={"a": torch.ones(4), "b": torch.ones(4)})
    assert not manifest.weights.tied


def test_files_are_safetensors_with_reproducible_bytes():
    data, entries = pack_tensors(some_tensors(), "file")
    assert data == pack_tensors(some_tensors(), "file")[0]
    assert_equal_bits(load_safetensors(data), some_tensors())
    for name, entry in entries.items():
        assert entry.start % some_tensors()[name].element_size() == 0


def test_the_index_names_the_file_of_each_tensor(store):
    manifest = published(store, shard_bytes=64)
    index = json.loads(fetch_model_file(store, manifest, "model.safetensors.index.json"))
    named = {name: entry.file for name, entry in manifest.weights.tensors.items()}
    assert index["weight_map"] == named


def test_shards_keep_the_order_and_the_bound():
    assert plan_shards({"a": 3, "b": 3, "c": 9, "d": 1, "e": 0}, 6) == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
    ]
    assert plan_shards({}, 6) == []


class CountingStore(MemoryStore):
    """Counts the bytes of tensors that were requested."""

    def __init__(self):
        super().__init__()
        self.bytes_read = 0

    def get(self, key, start=0, end=None):
        data = super().get(key, start, end)
        self.bytes_read += len(data) if key.endswith(".safetensors") else 0
        return data


def test_only_the_asked_tensors_are_read():
    store = CountingStore()
    large = {f"t{n}": torch.full((50_000,), float(n)) for n in range(5)}
    published(store, tensors=large)
    _, got = fetch_tensors(store, V1, tensors=["t1", "t3"])
    assert_equal_bits(got, {"t1": large["t1"], "t3": large["t3"]})
    assert store.bytes_read == 2 * 200_000


def test_neighbours_share_one_request(store):
    manifest = published(store)
    assert len(plan_ranges(manifest.weights.tensors)) == 1


def test_an_unknown_tensor_or_file_is_named(store):
    manifest = published(store)
    with pytest.raises(ObjectMissing, match="no tensor z"):
        fetch_tensors(store, V1, tensors=["a.weight", "z"])
    with pytest.raises(ObjectMissing, match=r"no file vocab\.json"):
        fetch_model_file(store, manifest, "vocab.json")


def test_fetched_tensors_are_the_callers_own(store):
    published(store)
    _, first = fetch_tensors(store, V1)
    first["a.weight"].zero_()
    assert_equal_bits(fetch_tensors(store, V1)[1], some_tensors())


def test_one_flipped_bit_is_refused_by_the_name_of_its_tensor(store):
    manifest = published(store)
    for name, entry in manifest.weights.tensors.items():
        if entry.start == entry.end:
            continue
        key = f"{version_folder(V1)}/{entry.file}"
        whole = store.get(key)
        broken = bytearray(whole)
        broken[entry.end - 1] ^= 1
        store.put(key, broken)
        with pytest.raises(CorruptObject, match=f"tensor {name} in object {key}"):
            fetch_tensors(store, V1)
        store.put(key, whole)


def test_a_truncated_file_and_a_changed_model_file_are_refused(store):
    manifest = published(store)
    key = f"{version_folder(V1)}/{manifest.weights.files[0].name}"
    store.put(key, store.get(key)[:-1])
    with pytest.raises(CorruptObject, match=key):
        fetch_tensors(store, V1)
    store.put(f"{version_folder(V1)}/config.json", b"{ }")
    with pytest.raises(CorruptObject, match=r"config\.json"):
        fetch_model_file(store, manifest, "config.json")


def test_another_manifest_than_the_announced_one_is_refused(store):
    manifest = published(store)
    other = published(store, V2)
    with pytest.raises(CorruptObject, match="announced"):
        fetch_tensors(store, V1, other.hash)
    store.put(manifest_key(V2), store.get(manifest_key(V1)))
    with pytest.raises(
        CorruptObject, match=f"is the manifest of another version, {manifest.version}"
    ):
        fetch_tensors(store, V2)


def test_a_version_without_manifest_is_not_there(store):
    published(store)
    store.delete(manifest_key(V1))
    with pytest.raises(ObjectMissing):
        fetch_tensors(store, V1)


def test_publishing_again_finds_the_version_and_changes_nothing(store):
    first = published(store, now_s=1.0)
    before = {entry.key: store.stat(entry.key) for entry in store.list()}
    assert published(store, now_s=2.0) == first
    assert {entry.key: store.stat(entry.key) for entry in store.list()} == before


def test_publishing_other_content_under_the_same_version_is_refused(store):
    published(store)
    with pytest.raises(StoreError, match="exists with other content"):
        published(store, tensors=some_tensors(seed=1))
    with pytest.raises(StoreError, match="completes other content"):
        published(store, parent=at(Version(0, 1)))
    assert_equal_bits(fetch_tensors(store, V1)[1], some_tensors())


def test_believe_moves_the_pointer_and_twice_is_once(store):
    assert believed_pointer(store) is None
    take_pointer(store, "run", 1)
    assert believed_pointer(store) is None
    manifest = published(store, parent=at(Version(0, 1)))
    pointer = advance_pointer(store, manifest)
    assert advance_pointer(store, manifest) == pointer == believed_pointer(store)
    assert (pointer.version, pointer.parent) == (V1, Version(0, 1))
    assert (pointer.manifest, pointer.manifest_hash) == (manifest_key(V1), manifest.hash)


def test_after_take_pointer_no_lower_term_can_move_it(store):
    take_pointer(store, "run", 1)
    advance_pointer(store, published(store, V1))
    late = published(store, V2)
    taken = take_pointer(store, "run", 2)
    assert (taken.term, taken.version) == (2, V1)
    with pytest.raises(Fenced, match="carries term 2"):
        advance_pointer(store, late)
    with pytest.raises(Fenced):
        take_pointer(store, "run", 1)
    assert believed_pointer(store) == taken
    assert take_pointer(store, "run", 2) == taken


class TakenMeanwhile(MemoryStore):
    """A higher term takes the pointer between the last read of a swap and the swap itself."""

    def swap(self, key, data, etag):
        if key == POINTER_KEY and json.loads(self.get(key))["term"] == 1:
            super().put(key, self.get(key).replace(b'"term": 1', b'"term": 2'))
        return super().swap(key, data, etag)


def test_a_swap_under_way_loses_to_the_higher_term():
    store = TakenMeanwhile()
    take_pointer(store, "run", 1)
    with pytest.raises(Fenced):
        advance_pointer(store, published(store, V1))
    assert read_pointer(store)[0].version is None  # pyright: ignore[reportOptionalSubscript]


def test_believing_needs_the_pointer_a_higher_number_and_the_manifest(store):
    manifest = published(store, Version(5, 2))
    with pytest.raises(SwapLost, match="take the pointer"):
        advance_pointer(store, manifest)
    take_pointer(store, "run", 1)
    with pytest.raises(SwapLost, match="take it before"):
        advance_pointer(store, manifest)
    take_pointer(store, "run", 2)
    advance_pointer(store, manifest)
    with pytest.raises(SwapLost, match="would go back"):
        advance_pointer(store, published(store, Version(4, 2)))
    missing = published(store, Version(6, 2))
    store.delete(manifest_key(Version(6, 2)))
    with pytest.raises(ObjectMissing):
        advance_pointer(store, missing)
    assert believed_pointer(store).version == Version(5, 2)  # pyright: ignore[reportOptionalMemberAccess]


def test_a_store_belongs_to_one_run(store):
    take_pointer(store, "run", 1)
    with pytest.raises(ConfigurationError, match="belongs to run 'run'"):
        take_pointer(store, "another", 2)


def test_version_folders_parse_back():
    for version in (Version(0, 1), Version(42, 7), Version(10**9, 12345)):
        assert parse_version(str(version)) == version
    assert parse_version("v42-t1") is None
    assert parse_version("latest.json") is None
