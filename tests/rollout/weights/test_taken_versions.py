"""Versions that a rollout fetches into its file and gives to the engine: the same bits as a load of
all tensors, whatever is damaged, lost or killed on the way.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from rollstream.errors import CorruptObject, ObjectMissing, StoreError
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch import weights
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.weights import (
    CollectedWrite,
    CopyWrite,
    PreparedWrites,
    ServedWeights,
    WholeWrite,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights import streamed
from rollstream.storage.weights.delta import sparse
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.mapped import MappedTensors, MappedWeights
from rollstream.storage.weights.named_streams import POLICY, WeightStream
from rollstream.streams.values import Version
from testbed.waiting import wait_for
from tests.rollout.weights.following import CONFIG, Followed, damage

Writes = tuple[WholeWrite | CopyWrite | CollectedWrite, ...]


@pytest.fixture(params=["memory", "disk"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[Followed]:
    if request.param == "disk":
        monkeypatch.setattr(streamed, "MEMORY_FILE_BYTES", 0)
        monkeypatch.setattr(weights, "MEMORY_FILE_BYTES", 0)
    followed = Followed(tmp_path)
    yield followed
    followed.close()


def weights_of(engine: TorchEngine) -> ServedWeights:
    assert isinstance(engine._weights, ServedWeights)
    return engine._weights


def take(run: Followed, engine: TorchEngine) -> Writes:
    """Take the newest version and compare all of it; returns the prepared writes."""
    fetched = run.fetched(engine.version)
    prepared = fetched.update.prepared
    engine.update(fetched.update, "in_flight")
    tensors = fetched.update.tensors
    compared = engine.read_back(tensors, tensors)
    assert (compared.count, compared.differing) == (len(tensors) - 1, ()), "one is tied"
    run.follower.compare(fetched, engine.read_back, 0.0)
    run.follower.await_verdict()
    verdict = run.follower.verdict()
    assert verdict is not None
    assert not verdict.compared.differing
    assert run.differing(engine) == []
    return (prepared.writes if isinstance(prepared, PreparedWrites) else None) or ()


@pytest.mark.parametrize(
    ("share", "dtype"),
    [
        (1, torch.bfloat16),
        (1 << 20, torch.float32),
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(1 << 20, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_chain_of_versions_serves_the_bits_of_each(
    run: Followed, monkeypatch: pytest.MonkeyPatch, share: int, dtype: torch.dtype
) -> None:
    """Deltas and anchors, norms that change, and versions that were passed over, written element by
    element and whole.
    """
    monkeypatch.setattr(weights, "PATCH_SHARE", share)
    monkeypatch.setattr(weights, "FILL_COLUMNS", share)
    monkeypatch.setattr(weights, "PART_ELEMENTS", 7)
    monkeypatch.setattr(sparse, "SEGMENT", 100)  # of tensors with 32 to 1536 elements
    run.publish()
    engine = run.engine(dtype)
    kinds: set[str] = set()
    written: set[type] = set()
    for skipped in (0, 0, 1, 0, 3, 0, 0, 9, 0):
        for _ in range(skipped + 1):
            version = run.publish()
            kinds.add(read_manifest(run.store, version).kind)
        written |= {type(write) for write in take(run, engine)}
        assert engine.version == version  # pyright: ignore[reportPossiblyUnboundVariable]
    assert "delta" in kinds
    assert (CollectedWrite in written) == (share == 1)
    whole = CopyWrite if weights.MEMORY_FILE_BYTES else WholeWrite
    assert whole in written or share == 1


@pytest.mark.parametrize("stream", [POLICY, WeightStream("draft")], ids=["policy", "named"])
def test_a_version_that_was_fetched_and_not_taken_is_passed_over(
    tmp_path: Path, stream: WeightStream
) -> None:
    run = Followed(tmp_path, stream)
    run.publish()
    engine = run.engine()
    run.publish()
    run.follower.read()
    run.follower.prefetch(engine.version)
    wait_for(lambda: not run.follower.is_busy())
    version = run.publish()
    run.follower.read()
    run.follower.fetch_ahead(engine.version)
    take(run, engine)
    assert engine.version == version
    run.close()


def test_a_failed_fetch_names_the_object_and_the_next_one_starts_over(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    version = run.publish()
    (key,) = objects_of(run, version, "delta-")
    content = run.store.get(key)
    run.store.delete(key)
    held = run.follower._weights
    with pytest.raises((ObjectMissing, CorruptObject), match="delta-"):
        held.update(run.store, version)
    run.store.create(key, content)
    take(run, engine)


def test_new_memory_needs_no_base(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    version = run.publish()
    run.follower._weights = MappedWeights()
    fetched = run.fetched(engine.version)
    assert (fetched.update.version, fetched.update.base) == (version, None)
    engine.update(fetched.update, "in_flight")
    assert run.differing(engine) == []


def test_the_first_fetch_is_counted(run: Followed) -> None:
    run.publish()
    tensors = run.fetched(None).update.tensors
    assert isinstance(tensors, MappedTensors)
    assert sizes(tensors) == sizes(run.tensors)
    assert tensors.damaged(tensors) == ()
    assert run.follower.fetched_bytes >= sum(sizes(run.tensors).values()) // 2
    assert sum(run.follower.fetch_s.counts()) == 1


def sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def test_bytes_that_changed_where_the_rollout_holds_them_are_found(run: Followed) -> None:
    run.publish()
    fetched = run.fetched(None)
    damaged = fetched.update.tensors["model.layers.1.mlp.down_proj.weight"]
    damaged.view(torch.int16)[1, 2] ^= 1
    engine = TorchEngine(CONFIG, fetched.update.tensors, Version(0, 1), EngineOptions(4, 64))
    run.follower.compare(fetched, engine.read_back, 0.0)
    run.follower.await_verdict()
    verdict = run.follower.verdict()
    assert verdict is not None
    assert verdict.compared.differing == ("model.layers.1.mlp.down_proj.weight",)


def test_memory_of_the_engine_that_changed_is_found(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    run.publish()
    fetched = run.fetched(engine.version)
    engine.update(fetched.update, "in_flight")
    damage(engine)
    compared = engine.read_back(fetched.update.tensors, fetched.update.tensors)
    assert compared.differing == ("model.layers.1.mlp.down_proj.weight",)


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
    assert read_manifest(run.store, version).kind == "delta"
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
        if read_manifest(run.store, version).kind == "anchor":
            break
        take(run, engine)
    keys = objects_of(run, version, "delta-")  # pyright: ignore[reportPossiblyUnboundVariable]
    assert keys, "the anchor has its delta beside it"
    for key in keys:
        flip(run.store, key)
    take(run, engine)


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
def test_a_store_that_fails_in_the_middle_changes_nothing_that_is_held(
    run: Followed, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    monkeypatch.setattr(streamed, "PIECE_BYTES", 512)
    run.publish()
    engine = run.engine()
    held = run.follower._weights
    run.publish()
    failing: ObjectStore = FailingStore(run.store, reads)  # pyright: ignore[reportAssignmentType]
    with pytest.raises(StoreError, match="gone"):
        held.update(failing, Version(1, 1))
    assert held.version == Version(0, 1)
    assert held.tensors.damaged(held.tensors) == ()
    take(run, engine)


def test_an_error_between_two_writes_leaves_no_version_to_generate_with(
    run: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    engine = run.engine()
    run.publish()
    fetched = run.fetched(engine.version)
    written: list[int] = []
    write = CollectedWrite.write

    def failing(self: CollectedWrite) -> None:
        if len(written) == 5:
            raise OSError("the disk is gone")
        written.append(1)
        write(self)

    monkeypatch.setattr(CollectedWrite, "write", failing)
    with pytest.raises(OSError, match="disk"):
        engine.update(fetched.update, "in_flight")
    assert weights_of(engine).held is None
    assert run.differing(engine), "it has some tensors of each version"
    assert not engine._serving, "so it generates nothing"
    monkeypatch.setattr(CollectedWrite, "write", write)
    engine.update(fetched.update, "in_flight")
    assert run.differing(engine) == [], "all tensors were loaded"


CHILD = """
import os, signal, sys
from pathlib import Path
from rollstream.producers.engines.torch.weights import CollectedWrite
from rollstream.storage.weights import streamed
from tests.rollout.weights.following import Followed
streamed.MEMORY_FILE_BYTES = 0
run = Followed(Path(sys.argv[1]))
run.publish()
engine = run.engine()
run.publish()
fetched = run.fetched(engine.version)
written, write = [], CollectedWrite.write
def killing(self):
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(1)
    write(self)
CollectedWrite.write = killing
engine.update(fetched.update, "in_flight")
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
    run = Followed(folder)
    engine = run.engine()
    assert engine.version == Version(1, 1)
    tensors = run.follower._weights.tensors
    assert engine.read_back(tensors, tensors).differing == ()
    run.close()
