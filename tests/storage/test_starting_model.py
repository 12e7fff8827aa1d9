"""The starting model in every kind of store: created once, verified, read by rows."""

import copy
from pathlib import Path

import pytest
import torch

from rollstream.errors import ConfigurationError, CorruptObject, NewerRelease
from rollstream.storage.starting_model import manifest as manifests
from rollstream.storage.starting_model.manifest import (
    MODEL_KEY,
    ModelSource,
    describe_model,
    read_model_manifest,
)
from rollstream.storage.starting_model.models import load_model, load_stored_model
from rollstream.storage.starting_model.put import check_same_model, copy_model, put_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.starting_model.rows import ModelRows, fetch_rows
from testbed.memory import MemoryStore


@pytest.fixture
def source(tmp_path, tiny_model, monkeypatch) -> ModelSource:
    """A model of several weight files, and small blocks so that each tensor has several."""
    monkeypatch.setattr(manifests, "BLOCK_BYTES", 256)
    model = copy.deepcopy(tiny_model).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="4KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return ModelSource(tmp_path / "model")


def damage(store, key: str) -> None:
    data = bytearray(store.get(key))
    data[-3] ^= 1
    store.put(key, bytes(data))


def test_every_store_gives_back_the_folder_the_tensors_and_any_rows(store, source, tmp_path):
    put = put_model(store, "run", source, 7.0)
    assert put == read_model_manifest(store)
    model = StoredModel(store, put)
    copy = model.write_folder(tmp_path / "copy")
    for path in source.folder.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()
    for name, tensor in load_model(str(source.folder)).state_dict().items():
        if name in put.tensors:
            count = len(tensor)
            rows = fetch_rows(model, name, count // 3, count // 2 + 1, torch.float32)
            assert torch.equal(rows, tensor[count // 3 : count // 2 + 1])


def test_the_same_model_again_writes_nothing_and_another_one_is_refused(store, source):
    first = put_model(store, "run", source, 7.0)
    before = {entry.key: entry.bytes for entry in store.list()}
    assert put_model(store, "run", source, 8.0) == first
    assert {entry.key: entry.bytes for entry in store.list()} == before
    (source.folder / "tokenizer.json").write_text('{"another": 1}')
    with pytest.raises(ConfigurationError, match=r"another model.*tokenizer\.json differs"):
        put_model(store, "run", source, 9.0)
    assert read_model_manifest(store) == first


def test_an_interrupted_upload_leaves_no_model_and_is_completed(source):
    class FullStore(MemoryStore):
        left = 3

        def create(self, key, data):
            self.left -= 1
            if not self.left:
                raise OSError("no space")
            return super().create(key, data)

    store = FullStore()
    with pytest.raises(OSError, match="no space"):
        put_model(store, "run", source, 7.0)
    assert read_model_manifest(store) is None
    put = put_model(store, "run", source, 7.0)
    assert StoredModel(store, put).fetch("tokenizer.json") == b"{}"


def test_damaged_objects_are_refused_by_name_and_only_blocks_with_wanted_rows_are_read(source):
    store = MemoryStore()
    put = put_model(store, "run", source, 7.0)
    name = max(put.tensors, key=lambda n: put.tensors[n].end - put.tensors[n].start)
    tensor, model = put.tensors[name], StoredModel(store, put)
    assert len(tensor.blocks) > 2
    fetch_rows(model, name, tensor.block_rows, tensor.block_rows + 1)
    assert model.store_bytes == tensor.block_rows * tensor.row_bytes
    key = put.key(tensor.file)
    data = bytearray(store.get(key))
    data[tensor.end - 1] ^= 1
    store.put(key, bytes(data))
    fetch_rows(model, name, 0, 1)  # its block is whole
    with pytest.raises(CorruptObject, match=rf"{name} in object {key} differs"):
        fetch_rows(model, name, 0, tensor.rows)
    damage(store, put.key("config.json"))
    with pytest.raises(CorruptObject, match=r"object model/.*/config\.json differs"):
        model.fetch("config.json")


def test_missing_objects_and_a_newer_format_are_refused(source):
    store = MemoryStore()
    put = put_model(store, "run", source, 7.0)
    store.delete(put.key("tokenizer.json"))
    with pytest.raises(Exception, match=r"tokenizer\.json"):
        StoredModel(store, put).fetch("tokenizer.json")
    store.put(MODEL_KEY, store.get(MODEL_KEY).replace(b'"tokenizer.json"', b'"../tokenizer"'))
    with pytest.raises(CorruptObject, match=r"names the file '\.\./tokenizer'"):
        read_model_manifest(store)
    newer = store.get(MODEL_KEY).replace(b'"format": 1', b'"format": 2')
    store.put(MODEL_KEY, newer)
    with pytest.raises(NewerRelease, match="format 2"):
        read_model_manifest(store)


def test_a_cache_is_verified_before_use_and_mended(source, tmp_path):
    store, cache = MemoryStore(), tmp_path / "cache"
    model = StoredModel(store, put_model(store, "run", source, 7.0))
    assert model.host_folder("", source.folder, cache) == source.folder
    assert model.store_bytes == 0
    assert model.host_folder("", tmp_path / "nowhere", cache) == cache
    assert {path.suffix for path in cache.iterdir()} == {".json"}  # no weights
    (cache / "config.json").write_text("damaged")
    model.host_folder("", None, cache)
    assert (cache / "config.json").read_bytes() == (source.folder / "config.json").read_bytes()


def test_a_folder_here_is_used_only_where_it_has_the_models_bytes(source, tmp_path, tiny_model):
    store = MemoryStore()
    put = put_model(store, "run", source, 7.0)
    here = StoredModel(store, put, (source.folder,))
    whole = load_model(str(source.folder)).state_dict()
    name = next(name for name in put.tensors if "q_proj" in name)
    assert torch.equal(fetch_rows(here, name, 0, 8, torch.float32), whole[name][:8])
    assert here.store_bytes == 0
    path = source.folder / put.tensors[name].file
    data = bytearray(path.read_bytes())
    data[put.tensors[name].start] ^= 1
    path.write_bytes(data)
    assert torch.equal(fetch_rows(here, name, 0, 8, torch.float32), whole[name][:8])
    assert here.store_bytes > 0
    assert here.whole_folder() is None
    with pytest.raises(ConfigurationError, match=f"tensor {name} differs|tensor .* differs"):
        check_same_model(put, source)


def test_a_model_is_built_from_the_store_bit_for_bit(source, tmp_path):
    store = MemoryStore()
    model = StoredModel(store, put_model(store, "run", source, 7.0))
    folder = model.host_folder("", None, tmp_path / "cache")
    built = load_stored_model(str(folder), ModelRows(model))
    whole = load_model(str(source.folder))
    assert built.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(built.state_dict()[name], tensor), name
    assert built.lm_head.weight is built.model.embed_tokens.weight
    assert built.training == whole.training
    ours, theirs = built.config.to_dict(), whole.config.to_dict()
    assert ours | {"_name_or_path": ""} == theirs | {"_name_or_path": ""}
    assert all(parameter.requires_grad for parameter in built.parameters())


def test_a_model_whose_names_are_converted_is_loaded_through_a_folder(source, tmp_path):
    store = MemoryStore()
    model = StoredModel(store, put_model(store, "run", source, 7.0))
    folder = model.host_folder("", None, tmp_path / "cache")
    lacking = next(name for name in model.manifest.tensors if "norm" in name)
    del model.manifest.tensors[lacking]  # as if the file had it under another name
    built = load_stored_model(str(folder), ModelRows(model))
    assert torch.equal(
        built.state_dict()[lacking], load_model(str(source.folder)).state_dict()[lacking]
    )


def test_a_copy_in_another_runs_store_has_the_same_objects(source):
    store, other = MemoryStore(), MemoryStore()
    put = put_model(store, "run", source, 7.0)
    assert copy_model(MemoryStore(), other, "fork") is None
    copied = copy_model(store, other, "fork")
    assert copied is not None
    assert (copied.run, copied.digest) == ("fork", put.digest)
    assert StoredModel(other, copied).fetch("tokenizer.json") == b"{}"


def test_a_tasks_files_and_tokenizer_are_part_of_the_model(source, tmp_path):
    rows, words = tmp_path / "rows.jsonl", tmp_path / "words"
    rows.write_text('{"prompt": "1 + 1"}\n')
    words.mkdir()
    (words / "tokenizer.json").write_text('{"its": "own"}')
    both = ModelSource(source.folder, str(words), (str(rows),))
    store, cache = MemoryStore(), tmp_path / "cache"
    model = StoredModel(store, put_model(store, "run", both, 7.0))
    rows.write_text('{"prompt": "2 + 2"}\n')
    with pytest.raises(ConfigurationError, match=r"another .*rows\.jsonl.*put that file back"):
        check_same_model(model.manifest, both)
    rows.unlink()
    name = model.manifest.task_files[str(rows)]
    assert model.host_file(name, rows, cache).read_text() == '{"prompt": "1 + 1"}\n'
    assert model.host_folder("tokenizer/", Path("/none"), cache) == cache / "tokenizer"
    assert (cache / "tokenizer" / "tokenizer.json").read_text() == '{"its": "own"}'
    assert describe_model(source, "run", 7.0).digest != model.manifest.digest
