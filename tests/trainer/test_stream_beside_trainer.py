"""A publisher of a named weight stream beside a real trainer and its rollouts: killed by SIGKILL at
its writes and started again, it disturbs neither, and a reader follows both streams.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollstream.producers.rollout.read_back import FetchedWeights
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.weights.named_streams import POLICY, WeightStream, run_streams
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import stored_versions
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.records import StepDone
from testbed.repository import ROOT
from testbed.servers import versity
from testbed.versions import small_tensors
from testbed.waiting import WAIT_S, wait_for
from tests.support.tiny_run import TinyRun, tiny_run

DRAFT = WeightStream("draft")
VERSIONS = 6
FATAL = (1, 2, 4, 7, 8, 9, 0)
"""The writes after which the publishers die in turn: the term, the pointer's term, a file, the
manifest and the pointer's version of version 0, a write of a later one; the last publisher lives.
"""
STORES: dict[str, Callable[[Path], str]] = {
    "file": lambda folder: f"file:{folder}/store",
    "s3": lambda folder: versity.new_url(),
}


@pytest.mark.parametrize("place", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_publisher_that_dies_at_any_write_disturbs_nobody(tmp_path: Path, place: str) -> None:
    url = STORES[place](tmp_path)
    with tiny_run(tmp_path, store=url, trainer={"steps": 2}) as run:
        read_or_create_identity(run.store, "tiny")
        run.bus.create([DRAFT.topic])
        drafts = WeightsFollower(run.bus, run.store, stream=DRAFT)
        policy = WeightsFollower(run.bus, run.store)
        run.start_all()
        trained = run.start_trainer()
        publisher = start_publisher(f"sqlite:{tmp_path / 'bus'}", url)
        held = followed_to(drafts, VERSIONS - 1, publisher)
        assert publisher.wait(WAIT_S) == 0
        wait_for(trained.is_set)
        assert_is(held, small_tensors(VERSIONS - 1))
        assert followed_to(policy, run.trainer.steps).announced.version.number == run.trainer.steps
        assert run.failures == []
        check_streams(run)


def start_publisher(bus_url: str, store_url: str) -> "subprocess.Popen[bytes]":
    words = (bus_url, store_url, "tiny", DRAFT.name, VERSIONS, *FATAL)
    module = "tests.trainer.stream_publisher"
    return subprocess.Popen([sys.executable, "-m", module, *map(str, words)], cwd=ROOT)


def followed_to(
    follower: WeightsFollower, number: int, process: "subprocess.Popen[bytes] | None" = None
) -> FetchedWeights:
    """What the follower holds once it has taken this version; it takes others before."""
    held: list[FetchedWeights] = []

    def take() -> FetchedWeights | None:
        follower.read()
        follower.prefetch(held[-1].announced.version if held else None)
        if (fetched := follower.take()) is not None:
            held.append(fetched)
        newest = held[-1] if held else None
        return newest if newest and newest.announced.version.number == number else None

    return wait_for(take)


def assert_is(fetched: FetchedWeights, tensors: dict[str, torch.Tensor]) -> None:
    assert fetched.update.tensors.keys() == tensors.keys()
    assert all(torch.equal(fetched.update.tensors[name], tensors[name]) for name in tensors)


def check_streams(run: TinyRun) -> None:
    """Each stream has its own believed version, and all that is kept is whole."""
    assert run_streams(run.store) == (POLICY, DRAFT)
    steps = [record.version for record in run.records("ledger", StepDone)]
    newest = {POLICY: steps[-1].number, DRAFT: VERSIONS - 1}
    for stream, number in newest.items():
        part = stream.part(run.store)
        pointer = believed_pointer(part)
        assert pointer is not None
        assert pointer.version is not None
        assert pointer.version.number == number
        for stored in stored_versions(part):
            if stored.whole:
                assert verify_version(part, stored.version)[1] == ""
    assert believed_pointer(DRAFT.part(run.store)).term == len(FATAL)  # pyright: ignore[reportOptionalMemberAccess]
