"""`rollstream run` as real processes: killed with -9, interrupted, resumed; then the log is
counted.
"""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from rollstream.streams.records import StepDone
from testbed.run_process import (
    assert_the_log_adds_up,
    read,
    role,
    role_restarted,
    started,
    steps_done,
)
from testbed.waiting import WAIT_S, wait_for


def test_every_role_killed_once_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, model: Path
) -> None:
    """Promise 1 with `kill -9`, one role after the other while the run continues."""
    folder = tmp_path / "run"
    with started(folder, model) as process:
        for steps, name in enumerate(("trainer", "rollout-0", "dispatch", "prompts"), start=2):
            wait_for(lambda: len(read(folder, "ledger", StepDone)) >= steps, process)  # noqa: B023
            victim = role(process, name)
            victim.send_signal(signal.SIGKILL)
            wait_for(lambda: role_restarted(process, name, victim.pid), process)  # noqa: B023
        assert process.wait(WAIT_S) == 0
    assert_the_log_adds_up(folder)
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.long
def test_an_interrupted_run_resumes_from_its_last_checkpoint(tmp_path: Path, model: Path) -> None:
    """Ctrl-C, then the same command again; with so many steps that no machine has finished by
    then.
    """
    folder, steps = tmp_path / "run", 30
    settings = [f"trainer.steps={steps}", "rollouts.count=1"]
    with started(folder, model, settings) as process:
        wait_for(lambda: steps_done(folder) >= 5, process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(WAIT_S) != 0
    assert len(read(folder, "ledger", StepDone)) < steps
    with started(folder, model, settings) as process:
        assert process.wait(WAIT_S) == 0
    began = re.findall(r"resumes after step (\d+)", (folder / "logs" / "trainer.log").read_text())
    assert int(began[-1]) >= 4
    assert int(began[-1]) % 4 == 0
    assert_the_log_adds_up(folder, steps)


@pytest.mark.slow
def test_the_whole_run_killed_at_once_resumes(tmp_path: Path, model: Path) -> None:
    """Supervisor and all roles die together, then the same command again."""
    folder = tmp_path / "run"
    with started(folder, model) as process:
        wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 3, process)
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait(WAIT_S)
        gone, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert gone
        assert not alive, "a role outlived its supervisor"
    with started(folder, model) as process:
        assert process.wait(WAIT_S) == 0
    assert_the_log_adds_up(folder)
