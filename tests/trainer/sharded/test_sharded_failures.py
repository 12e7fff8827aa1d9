"""A rank that ends, hangs or cannot write: all end, within the timeout, with an error that
names it. The rank that ends while others train is tested in test_sharded_learner.py.
"""

import os
import signal

import pytest

from testbed.waiting import WAIT_S, wait_for
from tests.trainer.sharded.sharded_ranks import rank_output, ranks, run_ranks

pytestmark = pytest.mark.slow


def test_a_killed_rank_is_named_while_nothing_is_trained(tmp_path):
    with ranks(tmp_path, 3, ["train:0-1", "idle:4", "train:2-2"], timeout_s=12) as started:
        wait_for(lambda: "idle" in rank_output(tmp_path, 0))
        started[2].kill()
        assert started[0].wait(WAIT_S) != 0
        assert started[1].wait(WAIT_S) != 0
    assert "rank 2 of the trainer is gone" in rank_output(tmp_path, 0)
    assert "RankLost: " in rank_output(tmp_path, 1)


def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path):
    with ranks(tmp_path, 2, ["train:0-0", "idle:2", "train:1-3"], timeout_s=8) as (first, second):
        wait_for(lambda: "idle" in rank_output(tmp_path, 0))
        os.kill(second.pid, signal.SIGSTOP)
        assert first.wait(WAIT_S) != 0
        os.kill(second.pid, signal.SIGCONT)
        assert second.wait(WAIT_S) != 0
    assert "does not answer within 8 s (trainer.ranks_timeout_s)" in rank_output(tmp_path, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_waits_for_the_log_ends_when_rank_0_is_gone_or_silent(tmp_path, how):
    jobs = ["train:0-0", "follow:", "idle:600"]
    with ranks(tmp_path, 2, jobs, timeout_s=8) as (first, second):
        wait_for(
            lambda: "follows" in rank_output(tmp_path, 1) and "idle" in rank_output(tmp_path, 0)
        )
        os.kill(first.pid, how)
        assert second.wait(WAIT_S) != 0
    assert "RankLost: rank 1: rank 0 is gone or silent" in rank_output(tmp_path, 1)


def test_a_damaged_part_of_one_rank_makes_all_of_them_take_the_checkpoint_before(tmp_path):
    run_ranks(tmp_path, 2, ["train:0-0", "keep:1", "train:1-1", "keep:2"])
    damaged = max((tmp_path / "store").rglob("s00000002-*/state-rank1-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert run_ranks(tmp_path, 2, ["restore:", "train:1-1"])["restored"] == 1
    assert all(damaged.name in rank_output(tmp_path, rank) for rank in (0, 1))


def test_a_rank_that_cannot_write_is_named_and_no_version_is_there(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights").write_text("a file where a folder is wanted")
    jobs = ["store=other", "train:0-0", "publish:0"]
    with ranks(tmp_path, 2, jobs, timeout_s=30) as (first, second):
        assert first.wait(WAIT_S) != 0
        assert second.wait(WAIT_S) != 0
    assert "StoreError: rank 1 of the trainer could not write" in rank_output(tmp_path, 0)
    assert not list((tmp_path / "store").rglob("manifest.json"))
