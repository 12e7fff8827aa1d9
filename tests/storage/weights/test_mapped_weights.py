"""Versions held in a file in place of memory (invariant 6): the same tensors and updates as in
memory, whatever is damaged, full or killed on the way, and memory that does not grow with them.
"""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollstream.errors import CorruptObject, StoreError
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights import streamed
from rollstream.storage.weights.delta import sparse
from rollstream.storage.weights.manifest import version_folder
from rollstream.storage.weights.mapped import MappedWeights
from rollstream.storage.weights.resident import ResidentUpdate, ResidentWeights
from testbed.memory import MemoryStore
from tests.storage.weights.version_samples import History, assert_same, changed, first_tensors


def patched(before: dict[str, torch.Tensor], update: ResidentUpdate, after: MappedWeights) -> dict:
    """The tensors before with the patches of the update, and the tensors that it names whole."""
    found = {name: tensor.clone() for name, tensor in before.items()}
    assert update.patches is not None
    for patch in update.patches:
        found[patch.name].view(-1)[patch.indices] = patch.values
    return found | {name: after.tensors[name].clone() for name in update.whole}


@pytest.mark.parametrize("segment", [7, 1 << 22])
def test_versions_come_back_bit_for_bit_and_patches_lead_from_one_to_the_next(
    store, monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    monkeypatch.setattr(sparse, "SEGMENT", segment)
    history = History(store, shard_bytes=600)
    for share in (0.02, 0.02, 0.9, 0.02):
        history.add(changed(history.tensors[-1], len(history.tensors), share))
    history.add(anchor=True)
    held, other = MappedWeights(), ResidentWeights()
    before: dict[str, torch.Tensor] = {}
    for number in (0, 1, 3, 2, 4, 4, 5):
        version, its_hash = history.version(number), history.manifests[number].hash
        update = held.update(store, version, its_hash)
        wanted = other.update(store, version, its_hash)
        assert_same(held.tensors, history.tensors[number])
        assert held.tensors["head"] is held.tensors["embed"]
        assert (update.manifest, update.base) == (wanted.manifest, wanted.base)
        if before:
            owned = history.manifests[number].weights.tensors
            assert_same(
                patched(before, update, held), {n: history.tensors[number][n] for n in owned}
            )
        owned = history.manifests[number].weights.tensors
        before = {name: held.tensors[name].clone() for name in owned}


def test_tensors_of_other_shapes_or_names_get_a_file_of_their_own() -> None:
    history = History()
    other = first_tensors(1)
    other["layer.weight"] = torch.randn(8, 16)
    del other["scale"]
    history.add(other)
    held = MappedWeights()
    held.update(history.store, history.version(0))
    first = held.tensors
    assert held.update(history.store, history.version(1)).patches is None
    assert_same(held.tensors, other)
    assert_same(first, history.tensors[0])


def test_a_failing_store_and_a_full_disk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "MEMORY_FILE_BYTES", 0)
    history = History()
    history.add()
    held = MappedWeights()
    held.update(history.store, history.version(0))

    def full(file: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"do not fit into .*No space left.*TMPDIR"):
        held.update(history.store, history.version(1))
    assert held.version == history.version(0)
    assert_same(held.tensors, history.tensors[0])
    with pytest.raises(StoreError, match="TMPDIR"):
        MappedWeights().update(history.store, history.version(0))
    monkeypatch.undo()
    monkeypatch.setattr(streamed, "MEMORY_FILE_BYTES", 0)
    assert held.update(history.store, history.version(1)).patches is not None
    assert_same(held.tensors, history.tensors[1])


def test_bytes_that_changed_in_the_file_are_found_and_never_become_a_base() -> None:
    history = History()
    history.add()
    held = MappedWeights()
    held.update(history.store, history.version(0))
    assert held.tensors.damaged(held.tensors) == ()
    held.tensors["layer.weight"].view(torch.int32)[3, 3] ^= 1
    assert held.tensors.damaged(held.tensors) == ("layer.weight",)
    update = held.update(history.store, history.version(1))
    assert "layer.weight" in update.whole, "it was fetched without a base"
    assert_same(held.tensors, history.tensors[1])


def test_a_tensor_that_cannot_be_made_leaves_no_version_and_the_next_update_repairs_it() -> None:
    history = History()
    history.add()
    folder = version_folder(history.version(1))
    (key,) = [one.key for one in history.store.list(f"{folder}/") if "delta-" in one.key]
    intact = history.store.get(key)
    held = MappedWeights()
    held.update(history.store, history.version(0))
    held.tensors["embed"].view(torch.int16)[0, 0] ^= 1  # a wrong base
    store = MemoryStore()
    for one in history.store.list(""):
        if "model-" not in one.key:  # without the anchor's tensors
            store.put(one.key, history.store.get(one.key))
    with pytest.raises((CorruptObject, OSError, LookupError)):
        held.update(store, history.version(1))
    assert held.version is None
    update = held.update(history.store, history.version(1))
    assert update.patches is None
    assert_same(held.tensors, history.tensors[1])
    assert history.store.get(key) == intact


KILLED = """
import os, signal, sys
from rollstream.storage.weights import streamed
streamed.MEMORY_FILE_BYTES = 0
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.mapped import MappedWeights
from rollstream.storage.weights.streamed import StreamedTensors
from rollstream.streams.values import Version
store, held = open_store(sys.argv[1]), MappedWeights()
held.update(store, Version(0, 1))
parts, begun = StreamedTensors.parts, []
def killing(self, name, base=None):
    begun.append(name)
    for part in parts(self, name, base):
        if len(begun) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield part
StreamedTensors.parts = killing
held.update(store, Version(1, 1))
"""


def test_a_kill_between_two_writes_leaves_no_file(tmp_path: Path) -> None:
    scratch, place = tmp_path / "scratch", f"file:{tmp_path / 'store'}"
    scratch.mkdir()
    history = History(open_store(place))
    history.add()
    line = [sys.executable, "-c", KILLED, place]
    ended = subprocess.run(line, env={**os.environ, "TMPDIR": str(scratch)}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(scratch.iterdir()) == []


MEASURED = """
import sys
from benchmarks.sizes.rank_process import PeakMemory, private_bytes
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.mapped import MappedWeights
from rollstream.streams.values import Version
store, held = open_store(sys.argv[1]), MappedWeights()
memory = PeakMemory()
for number in (0, 1, 0):
    held.update(store, Version(number, 1))
    print(memory.peaks["load"] - memory.joined)
"""


@pytest.mark.slow
def test_memory_beside_the_file_does_not_grow_with_the_version(tmp_path: Path) -> None:
    """256 MiB of tensors, of which half change: in memory they would take all of it, and the
    positions of the changes five times their bytes.
    """
    place = f"file:{tmp_path / 'store'}"
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": torch.randn(4 << 20, 8, generator=draw).to(torch.bfloat16) for i in range(4)
    }
    history = History(open_store(place), tensors, shard_bytes=64 << 20)
    nudged = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in nudged.values():
        tensor.view(torch.int16).view(-1)[::3] ^= 1
    history.add(nudged)
    line = [sys.executable, "-c", MEASURED, place]
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(line, env=environment, check=True, capture_output=True, text=True)
    assert max(map(int, found.stdout.split())) < 128 << 20
