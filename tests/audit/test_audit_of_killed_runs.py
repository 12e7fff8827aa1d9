"""Promise 1 as a user would check it: processes killed with -9, then one command."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from testbed.recount import places_of, recount
from testbed.run_process import STEPS, random_model, role, role_restarted, started, steps_done
from testbed.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long  # a minute of processes


def audit(folder: Path) -> tuple[int, dict]:
    line = [sys.executable, "-m", "rollstream", "audit", str(folder), "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def test_a_run_whose_roles_were_killed_audits_clean(tmp_path: Path) -> None:
    """Audits while the run lives and after it was stopped; a recount agrees. The run has more steps
    than it can train until then, however slow the audits between the kills are.
    """
    folder, model = tmp_path / "run", random_model(tmp_path / "model")
    with started(folder, model, ["trainer.steps=100000"]) as process:
        for steps, name in enumerate(("trainer", "rollout-0", "dispatch", "trainer"), start=2):
            wait_for(lambda: steps_done(folder) >= steps, process)  # noqa: B023
            victim: psutil.Process = role(process, name)
            victim.send_signal(signal.SIGKILL)
            wait_for(lambda: role_restarted(process, name, victim.pid), process)  # noqa: B023
            code, report = audit(folder)
            assert report["violations"] == 0, json.dumps(report["invariants"])
        enough = max(STEPS, steps_done(folder) + 2)  # two by the trainer of the last restart
        wait_for(lambda: steps_done(folder) >= enough, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) != 0
    code, report = audit(folder)
    assert report["violations"] == 0, json.dumps(report["invariants"])
    assert code in (0, 2)
    lines = {line["invariant"]: line for line in report["invariants"]}
    assert lines[1]["counts"]["steps"] >= STEPS
    assert lines[7]["counts"]["is the highest term"] >= 3
    counted = recount(places_of(str(folder)))
    assert counted["trajectories"]["trained_twice"] == counted["gaps"] == 0
    assert counted["groups"]["trained"] == lines[1]["counts"]["trained"]
    assert counted["tokens"]["trained"] == lines[5]["counts"]["tokens trained"]
