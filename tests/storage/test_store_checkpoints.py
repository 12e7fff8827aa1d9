"""Checkpoints are whole, or skipped with a reason."""

from dataclasses import replace

import pytest
import torch

from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.errors import CorruptObject, Fenced, ObjectMissing
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import seal
from rollstream.storage.weights.checkpoints import (
    CheckpointId,
    StoredCheckpoint,
    checkpoint_manifest,
    checkpoint_state,
    delete_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    plan_checkpoints,
    read_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from rollstream.storage.weights.pointer import take_pointer
from rollstream.storage.weights.shards import StoredTensors, part_name
from testbed.memory import MemoryStore
from tests.storage.store_faults import FaultyStore, Killed


def tensors_at(step):
    return {
        "masters/w": torch.full((3, 2), float(step)),
        "adam/step": torch.tensor(step),
        "rng/torch": torch.arange(16, dtype=torch.uint8),
    }


def write(store, step, term=1):
    return write_checkpoint(store, step, term, tensors_at(step), {"step": step, "open": [1, 2]}, 16)


def test_a_checkpoint_comes_back_whole(store):
    wanted = write(store, 10)
    assert wanted.folder == "checkpoints/s00000010-t0001"
    got = read_checkpoint(store, wanted)
    assert got.state == {"step": 10, "open": [1, 2]}
    assert set(got.tensors) == set(tensors_at(10))
    assert all(torch.equal(got.tensors[name], want) for name, want in tensors_at(10).items())


W = torch.arange(40, dtype=torch.float32).reshape(10, 4)
PARTS = {part_name("w", start, stop): W[start:stop] for start, stop in ((0, 4), (4, 8), (8, 10))}


def opened_parts(store: ObjectStore, shard_bytes: int) -> StoredTensors:
    wanted = write_checkpoint(store, 1, 1, PARTS | {"n": torch.tensor(7)}, {}, shard_bytes)
    found = open_checkpoint(store, wanted).tensors
    assert isinstance(found, StoredTensors)
    return found


@pytest.mark.parametrize("shard_bytes", [16, 80, 1 << 20])
def test_parts_of_rows_are_one_tensor_of_which_any_rows_are_read(store, shard_bytes):
    found = opened_parts(store, shard_bytes)
    assert set(found) == {"w", "n"}
    assert (found.shape("w"), found.shape("n"), found.shape("x")) == ((10, 4), (), None)
    assert torch.equal(found["w"], W)
    assert int(found["n"]) == 7
    for start in range(10):
        for stop in range(start + 1, 11):
            assert torch.equal(found.rows("w", start, stop), W[start:stop])
    whole = newest_checkpoint(store).checkpoint
    assert whole is not None
    assert torch.equal(whole.tensors["w"], W)


def test_only_parts_with_wanted_rows_are_read_and_each_is_verified(store):
    found = opened_parts(store, 16)
    for entry in list(store.list(found.folder)):
        if entry.key.endswith("of-00004.safetensors"):
            data = store.get(entry.key)
            store.put(entry.key, data[:-1] + bytes([data[-1] ^ 1]))
            if "w[4:8]" not in str(data[:200]):
                store.put(entry.key, data)
    assert torch.equal(found.rows("w", 0, 4), W[:4])
    assert torch.equal(found.rows("w", 8, 10), W[8:])
    with pytest.raises(CorruptObject, match=r"w\[4:8\]"):
        found.rows("w", 3, 5)


def test_a_checkpoint_with_parts_is_refused_by_releases_that_know_only_whole_tensors(store):
    assert checkpoint_manifest(store, write(store, 3)).format == 1
    opened_parts(store, 16)
    assert checkpoint_manifest(store, CheckpointId(1, 1)).format == 2


def test_the_newest_is_of_the_highest_term_and_then_step(store):
    for step, term in ((10, 1), (20, 1), (30, 2), (40, 1)):
        write(store, step, term)
    restored = newest_checkpoint(store)
    assert restored.checkpoint.id == CheckpointId(term=2, step=30)  # pyright: ignore[reportOptionalMemberAccess]
    assert restored.skipped == ()


def test_a_new_store_has_no_checkpoint(store):
    assert newest_checkpoint(store) == newest_checkpoint(MemoryStore())
    assert newest_checkpoint(store).checkpoint is None


def test_a_flipped_bit_anywhere_falls_back_to_the_one_before_with_the_reason(store):
    good = write(store, 10)
    bad = write(store, 20)
    for entry in list(store.list(f"{bad.folder}/")):
        whole = store.get(entry.key)
        at = len(whole) - 1 if entry.key.endswith(".safetensors") else len(whole) // 2
        store.put(entry.key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        restored = newest_checkpoint(store)
        assert restored.checkpoint.id == good  # pyright: ignore[reportOptionalMemberAccess]
        assert [name for name, _ in restored.skipped] == [bad]
        assert entry.key in restored.skipped[0][1]
        store.put(entry.key, whole)
    assert newest_checkpoint(store).checkpoint.id == bad  # pyright: ignore[reportOptionalMemberAccess]


def test_a_crash_at_any_write_leaves_the_one_before_and_doing_it_again_mends_it():
    counting = FaultyStore(MemoryStore(), fatal=-1, after=False)
    write(counting, 20)
    assert counting.writes > 3
    for fatal in range(counting.writes):
        store = MemoryStore()
        good = write(store, 10)
        with pytest.raises(Killed):
            write(FaultyStore(store, fatal, after=False), 20)
        assert newest_checkpoint(store).checkpoint.id == good  # pyright: ignore[reportOptionalMemberAccess]
        write(store, 20)
        assert newest_checkpoint(store).checkpoint.state["step"] == 20  # pyright: ignore[reportOptionalMemberAccess]


def test_a_trainer_that_lost_the_pointer_completes_no_checkpoint(store):
    take_pointer(store, "run", 2)
    with pytest.raises(Fenced, match="term 2"):
        write(store, 10, term=1)
    assert newest_checkpoint(store).checkpoint is None


def test_state_without_a_json_form_is_refused_before_anything_is_written(store):
    with pytest.raises(ValueError, match="JSON"):
        write_checkpoint(store, 1, 1, {}, {"loss": float("nan")})
    assert list(store.list()) == []


def test_the_newest_whole_ones_stay_and_older_leftovers_go():
    one, two, three, four = (CheckpointId(1, step) for step in (10, 20, 30, 40))
    stored = [
        StoredCheckpoint(one, True),
        StoredCheckpoint(two, False),
        StoredCheckpoint(three, True),
        StoredCheckpoint(four, False),
    ]
    assert plan_checkpoints(stored, keep=1) == [one, two]
    assert plan_checkpoints(stored, keep=2) == [two]
    assert plan_checkpoints([StoredCheckpoint(one, False)], keep=2) == []


def test_deleted_checkpoints_are_gone_and_an_interrupted_removal_is_not_whole(store):
    old = write(store, 10)
    write(store, 20)
    with pytest.raises(Killed):
        delete_checkpoints(FaultyStore(store, 1, after=False), [old])
    assert [one.whole for one in stored_checkpoints(store)] == [False, True]
    with pytest.raises(ObjectMissing):
        read_checkpoint(store, old)
    delete_checkpoints(store, [old])
    assert [one.id.step for one in stored_checkpoints(store)] == [20]


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"[1]", b'{"a": '])
def test_a_state_that_is_none_is_a_damaged_object(text):
    store = MemoryStore()
    one = write_checkpoint(store, 1, 1, {}, {"step": 1})
    key = f"{one.folder}/manifest.json"
    manifest = checkpoint_manifest(store, one)
    state = replace(manifest.state, bytes=len(text), hash=content_hash(text))
    store.put(key, seal(replace(manifest, state=state)))
    store.put(f"{one.folder}/state.json", text)
    with pytest.raises(CorruptObject, match=r"state\.json"):
        checkpoint_state(store, one)


@pytest.mark.parametrize("value", ["x", 1 << 80, [[]], None])
def test_values_that_are_no_state_of_a_trainer_are_a_damaged_object(value):
    with pytest.raises(CorruptObject, match="is no trainer"):
        TrainerState.decode({"step": value})
