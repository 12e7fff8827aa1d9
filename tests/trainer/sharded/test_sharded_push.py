"""Every rank pushes its own parts of a version to the relays; parts whose push fails come from the
store; and no version is completed before the parts of all ranks are stored.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollstream.storage.relay.client import TOKEN_VARIABLE
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.streams.values import Version
from testbed.relay_network import RelayNet, RelayProcess
from testbed.waiting import WAIT_S, wait_for
from tests.trainer.sharded.sharded_ranks import rank_output, ranks

ANCHOR, DELTA = Version(0, 1), Version(1, 1)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayNet]:
    """Relays and ranks share a token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "the-secret-of-this-run")
    with RelayNet(tmp_path) as net:
        yield net


def jobs(net: RelayNet, *more: str) -> list[str]:
    return [f"relays=sqlite:{net.folder / 'bus'}", "publish:0", "write_result:", *more, "until:end"]


def parts(manifest: Manifest, rank: int) -> int:
    """Bytes that this rank has written."""
    return sum(file.bytes for file in manifest.files if f"-rank{rank}-" in file.name)


def whole(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files) + len(encode_json(manifest))


def published(net: RelayNet, version: Version) -> Manifest:
    key = f"{net.folder}/store/weights/{version}/manifest.json"
    wait_for(
        Path(key).exists,
        describe=lambda: rank_output(net.folder, 0) + rank_output(net.folder, 1),
    )
    return read_manifest(net.store, version)


def assert_reads_alike(net: RelayNet, relay: RelayProcess, version: Version) -> None:
    """A rollout behind the relay has the tensors that the store has."""
    behind, direct, reader = ResidentWeights(), ResidentWeights(), net.store_for(relay)
    behind.update(reader, version)
    direct.update(net.store, version)
    assert behind.tensors.keys() == direct.tensors.keys()
    assert all(torch.equal(behind.tensors[name], one) for name, one in direct.tensors.items())
    assert reader.relay_bytes > 0


def test_relays_get_the_parts_of_all_ranks_by_push_and_read_nothing_from_the_store(
    net: RelayNet,
) -> None:
    (relay,) = net.start("a")
    with ranks(net.folder, 2, jobs(net, "until:next", "train:0-0", "publish:1")) as started:
        wait_for(lambda: relay.has(ANCHOR))  # not announced, so it can only have been pushed
        anchor = published(net, ANCHOR)
        net.announce(anchor)
        (net.folder / "next").touch()
        wait_for(lambda: relay.has(DELTA))
        delta = published(net, DELTA)
        assert delta.kind == "delta"
        net.announce(delta)
        assert_reads_alike(net, relay, DELTA)
        for manifest in (anchor, delta):
            assert min(parts(manifest, 0), parts(manifest, 1)) > 0
        assert relay.figure("pushed_bytes_total") == whole(anchor) + whole(delta)
        assert relay.figure("bucket_bytes_total") == 0
        (net.folder / "end").touch()
        assert [process.wait(WAIT_S) for process in started] == [0, 0]


@pytest.mark.slow
def test_the_parts_of_a_rank_whose_push_is_refused_come_from_the_store(net: RelayNet) -> None:
    """Between the push of the manifest and the announcement the relay lacks these parts, and does
    not count the version as complete.
    """
    (relay,) = net.start("a")
    refused = {1: {TOKEN_VARIABLE: "the-secret-of-another-run"}}
    with ranks(net.folder, 2, jobs(net), environments=refused):
        anchor = published(net, ANCHOR)
        pushed = whole(anchor) - parts(anchor, 1)
        wait_for(lambda: relay.figure("pushed_bytes_total") == pushed)
        wait_for(lambda: "status 401" in rank_output(net.folder, 1))
        assert not relay.has(ANCHOR)
        assert relay.figure("bucket_bytes_total") == 0
        net.announce(anchor)
        wait_for(lambda: relay.has(ANCHOR))
        assert_reads_alike(net, relay, ANCHOR)
        assert relay.figure("bucket_bytes_total") == parts(anchor, 1) > 0
        assert relay.figure("pushed_bytes_total") == pushed


@pytest.mark.slow
def test_no_version_is_completed_while_a_part_of_a_rank_is_not_stored(net: RelayNet) -> None:
    """Invariant 6: `create` of a pushing store returns before the object is stored."""
    (net.folder / "other").mkdir()
    (net.folder / "other" / "weights").write_text("a file where a folder is wanted")
    with ranks(net.folder, 2, ["store=other", *jobs(net)], timeout_s=30) as started:
        assert all(process.wait(WAIT_S) for process in started)
    assert "StoreError: rank 1 of the trainer could not write" in rank_output(net.folder, 0)
    assert not list((net.folder / "store").rglob("manifest.json"))
