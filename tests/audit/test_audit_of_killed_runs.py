"""Promise 1 as a user would check it: processes killed with -9, then one command."""

import json
import signal
from pathlib import Path

import pytest

from testbed.recount import places_of, recount
from testbed.run_driver import HERE
from testbed.run_process import STEPS, random_model, started

pytestmark = pytest.mark.long  # a minute of processes


def test_a_run_whose_roles_were_killed_audits_clean(tmp_path: Path) -> None:
    """Audits while the run lives and after it was stopped; a recount agrees. The run has more steps
    than it can train until then, however slow the audits between the kills are.
    """
    folder, model = tmp_path / "run", random_model(tmp_path / "model")
    with started(folder, model, ["trainer.steps=100000"]) as run:
        for steps, name in enumerate(("trainer", "rollout-0", "dispatch", "trainer"), start=2):
            run.wait_for_step(steps)
            run.kill(name)
            report = run.audit()
            assert report["violations"] == 0, json.dumps(report["invariants"])
        run.wait_for_step(max(STEPS, run.step() + 2))  # two by the trainer of the last restart
        assert run.newest().stop(signal.SIGINT) != 0
    done = HERE.run("audit", str(folder), "--json", code=None)
    report = json.loads(done.stdout)
    assert report["violations"] == 0, json.dumps(report["invariants"])
    assert done.returncode in (0, 2)
    lines = {line["invariant"]: line for line in report["invariants"]}
    assert lines[1]["counts"]["steps"] >= STEPS
    assert lines[7]["counts"]["is the highest term"] >= 3
    counted = recount(places_of(str(folder)))
    assert counted["trajectories"]["trained_twice"] == counted["gaps"] == 0
    assert counted["groups"]["trained"] == lines[1]["counts"]["trained"]
    assert counted["tokens"]["trained"] == lines[5]["counts"]["tokens trained"]
