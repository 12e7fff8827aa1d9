"""Versions streamed into an engine that keeps no second copy: the same bits as a load of all
tensors, whatever is damaged, lost or killed on the way.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollstream.errors import CorruptObject, EngineRefused, StoreError
from rollstream.producers.engines.torch import streamed_weights, view_elements
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.streamed_weights import (
    PartWrite,
    StreamedWeights,
    StreamedWrites,
)
from rollstream.producers.engines.torch.weights import TensorWrite
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights import streamed
from rollstream.storage.weights.delta import sparse
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.streamed import StreamedTensors, WrongBase, stream_version
from rollstream.streams.values import Version
from tests.rollout.weights.following import Followed, damage


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path, "streamed")
    yield followed
    followed.close()


def weights_of(engine: TorchEngine) -> StreamedWeights:
    assert isinstance(engine._weights, StreamedWeights)
    return engine._weights


def apply_newest(run: Followed, engine: TorchEngine) -> StreamedWrites:
    fetched = run.fetched(engine.version)
    prepared = fetched.update.prepared
    assert isinstance(prepared, StreamedWrites)
    engine.update(fetched.update, "in_flight")
    return prepared


def held_manifest(run: Followed, version: Version) -> Manifest:
    return read_manifest(run.store, version)


@pytest.mark.parametrize(
    ("share", "dtype"),
    [
        (1, torch.bfloat16),
        pytest.param(1 << 20, torch.float32, marks=pytest.mark.slow),
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(1 << 20, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_chain_of_versions_serves_the_bits_of_each(
    run: Followed, monkeypatch: pytest.MonkeyPatch, share: int, dtype: torch.dtype
) -> None:
    """Deltas and anchors, norms that change, and versions that were passed over, written element by
    element and part by part.
    """
    monkeypatch.setattr(streamed_weights, "PATCH_SHARE", share)
    monkeypatch.setattr(sparse, "SEGMENT", 100)  # of tensors with 32 to 1536 elements
    monkeypatch.setattr(view_elements, "BLOCK_ELEMENTS", 7)
    run.publish()
    engine = run.engine(dtype)
    kinds: set[str] = set()
    written: set[type] = set()
    for skipped in (0, 0, 1, 0, 3, 0, 0, 9, 0):
        for _ in range(skipped + 1):
            version = run.publish()
            kinds.add(held_manifest(run, version).kind)
        prepared = apply_newest(run, engine)
        written |= {type(write) for write in prepared.writes}
        assert engine.version == version  # pyright: ignore[reportPossiblyUnboundVariable]
        assert run.differing(engine) == []
        tensors = StreamedTensors(held_manifest(run, engine.version), None, 0, {}, {})
        compared = engine.read_back(tensors, tensors)
        assert (compared.count, compared.differing) == (len(run.tensors) - 1, ())
    assert "delta" in kinds
    assert (TensorWrite in written) == (share == 1)
    assert (PartWrite in written) or share == 1


def test_only_norms_are_kept_beside_layers_of_32_bits(run: Followed) -> None:
    run.publish()
    assert all("norm" in name for name in weights_of(run.engine()).kept)


def test_a_tensor_that_layers_of_16_bits_cannot_give_back_is_kept(run: Followed) -> None:
    run.publish()
    kept = weights_of(run.engine(torch.bfloat16)).kept
    assert "model.layers.0.mlp.gate_proj.weight" in kept, "its norm is multiplied in"
    assert "model.layers.0.mlp.down_proj.weight" not in kept


def test_a_column_whose_norm_is_zero_is_kept_as_long_as_it_is(run: Followed) -> None:
    """It cannot be divided out of the served zeros."""
    run.publish()
    engine, norm = run.engine(), "model.layers.0.input_layernorm.weight"
    query = "model.layers.0.self_attn.q_proj.weight"
    before = run.tensors[norm].clone()
    for zero in (True, False):
        run.publish()
        changed = dict(run.tensors)
        changed[norm] = torch.zeros_like(before) if zero else before
        run.number += 1
        run.published[run.versions.publish(run.number, changed)] = run.tensors = changed
        apply_newest(run, engine)
        assert run.differing(engine) == []
        assert (query in weights_of(engine).kept) == zero


def test_memory_that_changed_is_found_before_it_becomes_a_base(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    run.publish()
    damage(engine)
    held = held_manifest(run, engine.version)
    tensors = stream_version(run.store, Version(1, 1), held=held)
    with pytest.raises(WrongBase, match="down_proj"):
        list(tensors.parts("model.layers.1.mlp.down_proj.weight", _reader(engine)))
    apply_newest(run, engine)
    assert run.differing(engine) == [], "the tensor was fetched without a base"


def _reader(engine: TorchEngine) -> streamed.ReadElements:
    return weights_of(engine).reader("model.layers.1.mlp.down_proj.weight", "BF16")


def objects_of(run: Followed, version: Version, stem: str) -> list[str]:
    return [entry.key for entry in run.store.list(f"weights/{version}/") if stem in entry.key]


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[-2] ^= 1  # of the last payload
    store.delete(key)
    store.put(key, bytes(data))


def test_a_damaged_delta_leaves_the_old_version_in_use(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    version = run.publish()
    assert held_manifest(run, version).kind == "delta"
    (key,) = objects_of(run, version, "delta-")
    flip(run.store, key)
    run.follower._sleep = lambda s: None
    with pytest.raises(CorruptObject, match="differs from its hash"):
        run.fetched(engine.version)
    assert engine.version == Version(0, 1)
    assert run.differing(engine) == []


def test_a_damaged_delta_beside_an_anchor_is_replaced_by_the_anchor(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    for _ in range(40):
        version = run.publish()
        if held_manifest(run, version).kind == "anchor":
            break
        apply_newest(run, engine)
    keys = objects_of(run, version, "delta-")  # pyright: ignore[reportPossiblyUnboundVariable]
    assert keys, "the anchor has its delta beside it"
    for key in keys:
        flip(run.store, key)
    apply_newest(run, engine)
    assert run.differing(engine) == []


class FailingStore:
    """A store whose reads of objects fail after the first `reads`."""

    def __init__(self, store: ObjectStore, reads: int) -> None:
        self._store, self.reads = store, reads

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads -= key.endswith(".safetensors")
        if self.reads < 0:
            raise StoreError(f"{key}: the store is gone")
        return self._store.get(key, start, end)


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_store_that_fails_in_the_middle_changes_nothing_that_is_served(
    run: Followed, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    monkeypatch.setattr(streamed, "PIECE_BYTES", 512)
    run.publish()
    engine = run.engine()
    run.publish()
    held = held_manifest(run, engine.version)
    failing: ObjectStore = FailingStore(run.store, reads)  # pyright: ignore[reportAssignmentType]
    with pytest.raises(StoreError, match="gone"):
        stream_version(failing, Version(1, 1), held=held)
    assert run.differing(engine) == []
    apply_newest(run, engine)
    assert run.differing(engine) == []


def test_an_error_between_two_writes_leaves_no_version_to_generate_with(
    run: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    engine = run.engine()
    run.publish()
    fetched = run.fetched(engine.version)
    written: list[int] = []
    write = TensorWrite.write

    def failing(self: TensorWrite) -> None:
        if len(written) == 5:
            raise OSError("the disk is gone")
        written.append(1)
        write(self)

    monkeypatch.setattr(TensorWrite, "write", failing)
    with pytest.raises(OSError, match="disk"):
        engine.update(fetched.update, "in_flight")
    assert weights_of(engine).served.held is None
    assert run.differing(engine), "it has some tensors of each version"
    assert not engine._serving, "so it generates nothing"
    monkeypatch.setattr(TensorWrite, "write", write)
    with pytest.raises(EngineRefused, match="no version"):
        engine.update(fetched.update, "in_flight")
    complete = stream_version(run.store, Version(1, 1))
    engine.update(engine.prepare(fetched.update.__class__(Version(1, 1), complete)), "in_flight")
    assert run.differing(engine) == []


CHILD = """
import os, signal, sys
from pathlib import Path
from rollstream.producers.engines.torch.weights import TensorWrite
from tests.rollout.weights.following import Followed
run = Followed(Path(sys.argv[1]), "streamed")
run.publish()
engine = run.engine()
run.publish()
fetched = run.fetched(engine.version)
written, write = [], TensorWrite.write
def killing(self):
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(1)
    write(self)
TensorWrite.write = killing
engine.update(type(fetched.update)(fetched.update.version, fetched.update.tensors), "in_flight")
"""


def test_a_kill_between_two_writes_leaves_no_file_and_the_next_process_serves(
    tmp_path: Path,
) -> None:
    spool, folder = tmp_path / "spool", tmp_path / "run"
    spool.mkdir()
    line = [sys.executable, "-c", CHILD, str(folder)]
    ended = subprocess.run(line, env={**os.environ, "TMPDIR": str(spool)}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(spool.iterdir()) == []
    run = Followed(folder, "streamed")
    engine = run.engine()
    assert engine.version == Version(1, 1)
    tensors = StreamedTensors(held_manifest(run, engine.version), None, 0, {}, {})
    assert engine.read_back(tensors, tensors).differing == ()
    run.close()
