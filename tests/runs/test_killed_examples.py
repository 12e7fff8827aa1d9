"""Two examples as their readers run them, `examples/late-reward.toml` and `examples/longtail.toml`
made small, each with one of its processes killed in the middle.
"""

from collections import Counter
from pathlib import Path

import pytest

from rollstream.run.cli.main import main
from rollstream.streams.records import (
    Annotation,
    GroupClosed,
    RolloutStatus,
    StepDone,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from testbed.repository import ROOT
from testbed.run_driver import Machine, RunDriver
from testbed.run_process import read

LATE_REWARD = ROOT / "examples" / "late-reward.toml"
STEPS, GROUPS = 10, 4  # as in the late-reward example
LONGTAIL = ROOT / "examples" / "longtail.toml"
SMALL = (
    "paced.weights_bytes=4_000_000", "paced.time_scale=20.0", "trainer.steps=6",
    "trainer.groups_per_step=24", "rollouts.count=2", "checkpoints.every=2",
    "sampling.tokens_max=4000",
)  # fmt: skip


@pytest.mark.slow
def test_the_example_loses_nothing_when_its_scorer_is_killed(tmp_path: Path) -> None:
    """Promise 1 for late rewards, with `kill -9`."""
    folder = tmp_path / "run"
    with RunDriver(folder, LATE_REWARD, host=Machine(folder=ROOT)) as run:
        run.start()
        run.wait_for(lambda: len(read(folder, "annotations", Annotation)) >= 8)
        steps = len(read(folder, "ledger", StepDone))
        run.kill("scorer-0")
        run.wait_complete()
    assert steps < STEPS
    assert_all_that_was_trained_was_scored_once(folder)


def assert_all_that_was_trained_was_scored_once(folder: Path) -> None:
    takes = read(folder, "ledger", Take)
    trained = Counter(member.trajectory for take in takes for member in take.members)
    assert max(trained.values()) == 1
    assert len({g.group for take in takes for g in take.groups}) == STEPS * GROUPS
    closed = read(folder, "ledger", GroupClosed)  # lag may close some, the scorer's death none
    assert [one.detail for one in closed if "max_lag" not in one.detail] == []
    assert {record.reward for record in read(folder, "trajectories", Trajectory)} == {None}
    used = Counter((n.trajectory, n.name) for take in takes for n in take.annotations)
    assert max(used.values()) == 1
    assert {(t, name) for t in trained for name in ("reward", "brevity")} <= set(used)
    noted = {(n.trajectory, n.name) for n in read(folder, "annotations", Annotation)}
    assert set(used) <= noted


@pytest.mark.long
def test_a_killed_trainer_makes_the_same_weights_again(tmp_path: Path) -> None:
    """Promise 1 with neither a model nor an accelerator: the audit finds nothing."""
    folder = tmp_path / "run"
    with RunDriver(folder, LONGTAIL, SMALL, Machine(folder=ROOT)) as run:
        run.start()
        run.wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 3)
        run.kill("trainer")
        run.wait_complete()
    assert "no model" in (folder / "report.html").read_text(encoding="utf-8")
    assert main(["audit", str(folder)]) == 0
    steps = read(folder, "ledger", StepDone)
    assert sorted(done.step for done in steps) == [1, 2, 3, 4, 5, 6]
    assert_what_flowed_is_real(folder)


def assert_what_flowed_is_real(folder: Path) -> None:
    lengths = [len(one.logprobs) for one in read(folder, "trajectories", Trajectory)]
    assert len(set(lengths)) > 100
    assert max(lengths) <= 4000
    deltas = [one for one in read(folder, "weights", WeightsAnnounced) if one.kind == "delta"]
    assert deltas
    assert max(one.bytes for one in deltas) < 0.05 * 4_000_000
    statuses = read(folder, "status", RolloutStatus)
    assert {(one.kv_capacity, one.decode_batch_max) for one in statuses} == {(176_000, 64)}
