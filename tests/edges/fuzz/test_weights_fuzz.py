"""Weight versions and starting models of somebody else: tensors, or a typed error. Manifests get a
right hash again after each change, as a hostile writer would do.
"""

import json

import pytest
import torch
from hypothesis import given, strategies as st

from rollstream.errors import CorruptObject
from rollstream.storage.model_folder.hf_folder import CONFIG
from rollstream.storage.model_folder.hf_weights import (
    INDEX,
    WEIGHTS,
    check_hf_weights,
    hf_weight_files,
)
from rollstream.storage.starting_model.manifest import (
    MODEL_KEY,
    ModelSource,
    describe_model,
    read_model_manifest,
)
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.starting_model.rows import fetch_rows
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.fetch import export_version, fetch_tensors
from rollstream.storage.weights.manifest import Manifest, manifest_key, parse_version
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from tests.edges.fuzz.damage import ODD, changed_bytes, changed_json, checked, examples
from tests.storage.weights.version_samples import History


def _history() -> History:
    """An anchor, and a version whose tensors are sparse and dense deltas and unchanged."""
    tensors = {"a": torch.arange(64, dtype=torch.float32), "b": torch.ones(3, 4)}
    history = History(tensors=tensors | {"c": torch.zeros(5, dtype=torch.bfloat16)})
    history.add({"a": tensors["a"] + (torch.arange(64) == 3), "b": torch.zeros(3, 4)} | {
        "c": history.tensors[0]["c"]
    })  # fmt: skip
    return history


HISTORY = _history()
KEYS = [entry.key for entry in HISTORY.store.list("weights/")]


def _with(key: str, data: bytes) -> MemoryStore:
    store = MemoryStore()
    for other in KEYS:
        store.put(other, data if other == key else HISTORY.store.get(other))
    return store


def _read(store: MemoryStore) -> None:
    for version in (Version(0, 1), Version(1, 1)):
        checked(lambda version=version: fetch_tensors(store, version))
        checked(lambda version=version: verify_version(store, version))


@given(st.integers(0, 1), st.data())
@examples(150)
def test_a_version_with_another_manifest_is_read_or_refused(
    number: int, data: st.DataObject
) -> None:
    key = manifest_key(Version(number, 1))
    manifest = changed_json(data.draw, json.loads(HISTORY.store.get(key)))
    _read(_with(key, json.dumps(manifest).encode()))


@given(st.sampled_from(KEYS), st.data())
@examples(60)
def test_a_version_with_damaged_bytes_is_read_or_refused(key: str, data: st.DataObject) -> None:
    _read(_with(key, changed_bytes(data.draw, HISTORY.store.get(key))))


def _edited(number: int, edit) -> MemoryStore:
    key = manifest_key(Version(number, 1))
    manifest = json.loads(HISTORY.store.get(key))
    edit(manifest)
    return _with(key, json.dumps(manifest).encode())


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "", "x" * 300, "a\x00b"])
def test_files_of_a_version_have_plain_names(name: str, tmp_path) -> None:
    def edit(manifest) -> None:
        manifest["model_files"][0]["name"] = name

    with pytest.raises(CorruptObject, match="names the file"):
        export_version(_edited(0, edit), Version(0, 1), tmp_path / "out", 1 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1 << 40, 1 << 50, 1 << 62, 10**400])
def test_a_size_that_only_the_manifest_states_takes_no_memory(size: int) -> None:
    def tensor(manifest) -> None:
        entry = manifest["weights"]["tensors"]["a"]
        entry["shape"], entry["end"] = [size // 4], entry["start"] + size

    def dense(manifest) -> None:
        entry = manifest["weights"]["tensors"]["b"]
        entry["shape"], entry["end"] = [size // 4], entry["start"] + size
        manifest["delta"]["tensors"]["b"] |= {"coding": "dense", "values": "", "base": ""}

    def file(manifest) -> None:  # no contradiction is left: the object is shorter
        tensor(manifest)
        manifest["weights"]["files"][0]["bytes"] = size * 2

    for number, edit in ((0, file),) if size < 1 << 53 else ():
        with pytest.raises(CorruptObject):
            fetch_tensors(_edited(number, edit), Version(number, 1))
    for number, edit in ((0, tensor), (1, dense)):
        with pytest.raises(CorruptObject, match=r"manifest\.json"):
            fetch_tensors(_edited(number, edit), Version(number, 1))


@given(st.text(max_size=12) | st.from_regex(r"v\d{6,30}-t\d{2,30}", fullmatch=True))
@examples(60)
def test_a_name_is_a_version_or_none(name: str) -> None:
    version = parse_version(name)
    assert version is None or parse_version(str(version)) == version


def test_a_version_of_thousands_of_digits_is_none() -> None:
    assert parse_version(f"v{'9' * 5000}-t0001") is None


# ---- the starting model -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def starting_model(tmp_path_factory: pytest.TempPathFactory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    save_file({"w": torch.arange(40.0).reshape(10, 4), "s": torch.tensor(2.0)}, folder / WEIGHTS)
    (folder / CONFIG).write_text('{"vocab_size": 3}')
    store, manifest = MemoryStore(), describe_model(ModelSource(folder), "r", 0.0)
    for entry in manifest.files:
        store.put(manifest.key(entry.name), (folder / entry.name).read_bytes())
    return folder, store, encode_json(manifest)


@given(st.data())
@examples(100)
def test_a_starting_model_with_another_manifest_is_read_or_refused(
    starting_model, data: st.DataObject
) -> None:
    _, store, manifest = starting_model
    other = changed_json(data.draw, json.loads(manifest))
    store.put(MODEL_KEY, json.dumps(other).encode())
    described = checked(lambda: read_model_manifest(store))
    if described is not None:
        model = StoredModel(store, described)
        for name, tensor in described.tensors.items():
            checked(lambda name=name, tensor=tensor: fetch_rows(model, name, 0, tensor.rows))
        for entry in described.files:
            checked(lambda entry=entry: model.fetch(entry.name))


HEADERS = [
    {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"a": "b"}}
]


@given(st.data())
@examples(80)
def test_a_models_folder_is_described_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "foreign"
    folder.mkdir(exist_ok=True)
    header = json.dumps(changed_json(data.draw, HEADERS[0])).encode()
    if data.draw(st.booleans()):
        header = changed_bytes(data.draw, header)
    size = data.draw(st.sampled_from([len(header)] * 3 + [0, 1 << 40, (1 << 64) - 1]))
    (folder / WEIGHTS).write_bytes(size.to_bytes(8, "little") + header + bytes(16))
    (folder / CONFIG).write_bytes(changed_bytes(data.draw, b'{"vocab_size": 3}'))
    index = {"weight_map": {"w": data.draw(ODD) if data.draw(st.booleans()) else WEIGHTS}}
    (folder / INDEX).unlink(missing_ok=True)
    if data.draw(st.booleans()):
        (folder / INDEX).write_bytes(changed_bytes(data.draw, json.dumps(index).encode()))
    checked(lambda: check_hf_weights(folder))
    checked(lambda: hf_weight_files(folder))
    checked(lambda: describe_model(ModelSource(folder), "r", 0.0))


def test_a_manifest_still_comes_back_as_it_was() -> None:
    for manifest in HISTORY.manifests:
        data = HISTORY.store.get(manifest_key(manifest.version))
        assert encode_json(manifest) == data
        assert isinstance(manifest, Manifest)
