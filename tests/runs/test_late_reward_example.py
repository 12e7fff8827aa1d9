"""`examples/late-reward.toml` as its reader runs it, with the scorer killed in the middle."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from rollstream.streams.records import Annotation, GroupClosed, StepDone, Take, Trajectory
from testbed.repository import ROOT
from testbed.run_process import read, role, role_restarted, run_line, running
from testbed.waiting import WAIT_S, wait_for

EXAMPLE = ROOT / "examples" / "late-reward.toml"
STEPS, GROUPS = 10, 4  # as in the example


@pytest.mark.slow
def test_the_example_loses_nothing_when_its_scorer_is_killed(tmp_path: Path) -> None:
    """Promise 1 for late rewards, with `kill -9`."""
    folder = tmp_path / "run"
    line, output = run_line(EXAMPLE, folder, ()), tmp_path / "output.txt"
    with running(line, output, cwd=ROOT) as process:
        wait_for(lambda: len(read(folder, "annotations", Annotation)) >= 8, process)
        victim = role(process, "scorer-0")
        victim.send_signal(signal.SIGKILL)
        steps = len(read(folder, "ledger", StepDone))
        wait_for(lambda: role_restarted(process, "scorer-0", victim.pid), process)
        assert process.wait(WAIT_S) == 0, output.read_text()
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
