"""`examples/longtail.toml` as its reader runs it, made small, the trainer killed in the middle."""

import signal
from pathlib import Path

import pytest

from rollstream.cli.main import main
from rollstream.streams.records import RolloutStatus, StepDone, Trajectory, WeightsAnnounced
from testbed.repository import ROOT
from testbed.run_process import read, role, role_restarted, run_line, running
from testbed.waiting import WAIT_S, wait_for

EXAMPLE = ROOT / "examples" / "longtail.toml"
SMALL = (
    "paced.weights_bytes=4_000_000", "paced.time_scale=20.0", "trainer.steps=6",
    "trainer.groups_per_step=24", "rollouts.count=2", "checkpoints.every=2",
    "sampling.tokens_max=4000",
)  # fmt: skip


@pytest.mark.slow
def test_a_killed_trainer_makes_the_same_weights_again(tmp_path: Path) -> None:
    """Promise 1 with neither a model nor an accelerator: the audit finds nothing."""
    folder = tmp_path / "run"
    line, output = run_line(EXAMPLE, folder, SMALL), tmp_path / "output.txt"
    with running(line, output, cwd=ROOT) as process:
        wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 3, process)
        victim = role(process, "trainer")
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: role_restarted(process, "trainer", victim.pid), process)
        assert process.wait(WAIT_S) == 0, output.read_text()
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
