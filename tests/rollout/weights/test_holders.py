"""What every `WeightHolder` promises, by each way and by the smallest one that keeps it, and by one
of them for a named weight stream.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.rollout import holder
from rollstream.producers.rollout.holder import HOLDERS, Fetch, FetchMeter, WeightHolder
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.named_streams import POLICY, WeightStream
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.streams.values import Version
from testbed.waiting import wait_for
from tests.rollout.weights.following import Followed

WAYS = [*((way, POLICY) for way in (*HOLDERS, "reread")), ("mapped", WeightStream("draft"))]


class Reread(WeightHolder):
    """Reads every tensor of every version."""

    def update(self, fetch: Fetch) -> tuple[Manifest, WeightUpdate]:
        weights = ResidentWeights()
        fetch.meter.count(lambda: weights.update(fetch.store, fetch.version, fetch.manifest_hash))
        assert weights.manifest is not None
        update = WeightUpdate(fetch.version, weights.tensors)
        return weights.manifest, fetch.prepare(update)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]} {way[1].name}".strip())
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[Followed]:
    monkeypatch.setattr(holder, "HOLDERS", {**HOLDERS, "reread": f"{__name__}:Reread"})
    followed = Followed(tmp_path, *request.param)
    yield followed
    followed.close()


def follow(run: Followed, engine: TorchEngine) -> None:
    fetched = run.fetched(engine.version)
    engine.update(fetched.update, "in_flight")
    run.follower.compare(fetched, engine.read_back, 0.0)
    run.follower.await_verdict()
    verdict = run.follower.verdict()
    assert verdict is not None
    assert not verdict.compared.differing


def test_the_engine_serves_the_bits_of_each_version(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    for passed_over in (0, 1, 0, 2):
        for _ in range(passed_over + 1):
            version = run.publish()
        follow(run, engine)
        assert engine.version == version  # pyright: ignore[reportPossiblyUnboundVariable]
        assert run.differing(engine) == []


def test_a_version_that_was_fetched_and_not_taken_is_passed_over(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    run.publish()
    run.follower.read()
    run.follower.prefetch(engine.version)
    wait_for(lambda: not run.follower.is_busy())
    version = run.publish()
    run.follower.read()
    run.follower.fetch_ahead(engine.version)
    follow(run, engine)
    assert engine.version == version
    assert run.differing(engine) == []


def test_a_failed_update_names_the_object_and_the_next_one_starts_over(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    version = run.publish()
    manifest = read_manifest(run.store, version)
    file = next(iter((manifest.delta or manifest).files)).name
    key = f"weights/{version}/{file}"
    content = run.store.get(key)
    held = run.follower._holder
    assert held is not None
    run.store.delete(key)
    with pytest.raises((ObjectMissing, CorruptObject), match=file):
        held.update(fetch_of(run, engine, version))
    run.store.create(key, content)
    follow(run, engine)
    assert run.differing(engine) == []


def test_renewed_memory_holds_nothing_and_needs_no_base(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    version = run.publish()
    assert run.follower._holder is not None
    held = run.follower._holder.renewed()
    manifest, update = held.update(fetch_of(run, engine, version))
    assert (manifest.version, update.version, update.base) == (version, version, None)
    engine.update(update, "in_flight")
    assert run.differing(engine) == []


def test_sizes_are_those_of_the_tensors_and_nothing_undamaged_is_damaged(run: Followed) -> None:
    run.publish()
    fetched = run.fetched(None)
    tensors = fetched.update.tensors
    assert fetched.holder.sizes(tensors) == sizes(run.tensors)
    assert fetched.holder.damaged(tensors, list(tensors)) == ()


def test_fetches_are_counted(run: Followed) -> None:
    run.publish()
    run.fetched(None)
    meter = run.follower.fetches
    assert meter.fetched_bytes >= sum(sizes(run.tensors).values()) // 2
    assert sum(meter.fetch_s.counts()) == 1


def fetch_of(run: Followed, engine: TorchEngine, version: Version) -> Fetch:
    return Fetch(run.store, version, None, engine.prepare, FetchMeter())


def sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in tensors.items()}
