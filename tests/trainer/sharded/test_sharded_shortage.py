"""Memory that runs out on a rank: all ranks end, and the next term trains that round in halves,
then in quarters; what fits in no size ends as poisoned. The ledger alone decides it.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import astuple

from rollstream.consumers.trainer.data.poisoned_takes import FAILED_MAX
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.sharded.learner import split_samples
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import CheckpointId, read_checkpoint
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GroupClosed, StepDone, Superseded, Take, TakeFailed
from testbed.repository import ROOT
from testbed.stepped.hand_fed_trainer import SETTINGS, HandFed
from testbed.waiting import WAIT_S
from tests.trainer.learning_reference import build, largest_difference
from tests.trainer.sharded.sharded_process import MODEL, rules, stream
from tests.trainer.sharded.sharded_ranks import run_ranks


def fed(folder: Path, groups: int) -> HandFed:
    """A run of two steps of two groups. Each group's two samples are a micro-batch of its own."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    run = HandFed(folder, bus=bus, settings={"micro_batch_tokens": 8})
    run.feed(*range(groups))
    return run


def trained_by_ranks(run: HandFed, terms_max: int, **plan: object) -> int:
    """Lets two ranks train the run; returns the number of terms. `plan` as in `fed_ranks.py`."""
    line = [sys.executable, "-m", "tests.trainer.sharded.fed_ranks", str(run.folder)]
    line += [str(terms_max), json.dumps({"settings": SETTINGS | run.settings, **plan})]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("tight", [[1], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_a_round_on_which_memory_ran_out_is_trained_in_halves_by_the_next_term(tmp_path, tight):
    """Live takes are trained whole, so each of the two steps fails once; the third term repeats the
    first step in halves again, and has the same bits, since it records no other `StepDone`. Both
    ranks out of memory in one round are one failure.
    """
    run = fed(tmp_path, 4)
    assert trained_by_ranks(run, 3, ranks=tight, most=1) == 3
    assert [astuple(failed) for failed in run.ledger(TakeFailed)] == [
        (step, 0, (0, 1), "OutOfMemoryError: planted", True) for step in (1, 2)
    ]
    done = run.ledger(StepDone)
    assert [one.step for one in done] == [1, 2]
    assert [one.metrics["micro_batches_halved"] for one in done] == [2.0, 2.0]
    groups = [group.group for take in run.ledger(Take) for group in take.groups]
    assert sorted(groups) == [0, 1, 2, 3]
    assert run.ledger(Superseded) == []
    assert run.offences() == []


@pytest.mark.slow
def test_a_round_that_fits_in_no_size_ends_as_poisoned(tmp_path):
    run = fed(tmp_path, 6)
    assert trained_by_ranks(run, FAILED_MAX + 1, ranks=[0, 1], broken=1) == FAILED_MAX + 1
    assert [(f.step, f.micro_batches) for f in run.ledger(TakeFailed)] == [(1, (0, 1))] * FAILED_MAX
    (superseded,) = run.ledger(Superseded)
    assert superseded.poisoned == (0, 1)
    assert {c.group: c.reason for c in run.ledger(GroupClosed)} == {0: "dead", 1: "dead"}
    assert [one.step for one in run.ledger(StepDone)] == [1, 2]
    assert run.offences() == []


def test_two_ranks_learn_in_halves_what_one_process_learns_from_whole_micro_batches(tmp_path):
    """The micro-batches have 1, 3 and 5 samples in turn; of a round of 1 and 3 only the second is
    divided, and the first rank runs a sample at weight zero in its second part.
    """
    result = run_ranks(tmp_path, 2, ["shortages=1", "train:0-3", "keep:4"])
    assert [one.get("micro_batches_halved", 0.0) for one in result["metrics"]] == [0, 1, 2, 3]
    learner = TorchLearner(build(MODEL), rules())
    for update, ours in enumerate(result["metrics"]):
        for batch in stream(update):
            learner.submit(batch)
        theirs = learner.finish_update()
        for name in theirs.keys() - {"busy_s"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    learner.close()
    store = open_store(f"file:{tmp_path / 'store'}")
    state = dict(read_checkpoint(store, CheckpointId(1, 4)).tensors)
    assert largest_difference(state, learner.state()) < 1e-5


def test_no_part_has_only_masked_samples():
    samples = [one for batch in stream(3) for one in batch][:6]
    hidden = [replace(one, mask=np.zeros_like(one.mask)) for one in samples[:3]]
    parts = split_samples([*hidden, *samples[3:]], 4)
    assert [[one.trajectory for one in part if one.mask.any()] for part in parts] == [
        [one.trajectory] for one in samples[3:]
    ] + [[]]
    assert len(parts[0]) == 4
    assert parts[3] == []
