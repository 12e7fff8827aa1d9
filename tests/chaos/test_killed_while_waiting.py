"""`kill -9` of a rollout whose episodes wait for their environment: real processes, a sleeping
environment, the paced engine. The episodes resume elsewhere from their partials.
"""

from pathlib import Path

import pytest

from benchmarks.agents.world import CONFIGURATION, options
from benchmarks.runs.watched import watched
from rollstream.run.cli.main import main
from rollstream.streams.records import Assignment, GroupClosed, Partial, Trajectory
from testbed.run_process import read

SETTINGS = (
    "trainer.steps=100",
    "rollouts.count=2",
    "rollouts.slots=16",
    "rollouts.partial_s=0.2",
    "dispatch.heartbeat_timeout_s=3",
    "dispatch.max_lag=2",
    "task.redundancy=2",
    *options(turns=3, shape="fixed", scale=0.5),
)


def resumed(folder: Path) -> set[str]:
    orders = read(folder, "assignments", Assignment)
    return {order.trajectory for order in orders if order.kind == "resume"}


def finished(folder: Path) -> set[str]:
    return {one.trajectory for one in read(folder, "trajectories", Trajectory)}


@pytest.mark.slow
def test_episodes_that_wait_in_a_killed_rollout_resume_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with watched(folder, SETTINGS, CONFIGURATION) as run:
        run.wait_for(lambda: any(b[-1].parked >= 8 for b in run.beats.values()))
        run.wait_for(lambda: len(read(folder, "partials", Partial)) > 0)
        victim = max(run.beats, key=lambda name: run.beats[name][-1].parked)
        run.role(victim).kill()
        run.wait_for(lambda: not resumed(folder).isdisjoint(finished(folder)))
        parts = {one.trajectory for one in read(folder, "partials", Partial)}
        assert resumed(folder) <= parts
        assert not [one for one in read(folder, "ledger", GroupClosed) if one.reason == "dead"]
    assert main(["audit", str(folder)]) == 0
