"""`rollstream run` as real processes: killed with -9, interrupted, resumed; then the log is
counted.
"""

import re
import signal
from pathlib import Path

import pytest

from rollstream.streams.records import StepDone
from testbed.run_process import assert_the_log_adds_up, read, started


def test_every_role_killed_once_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, model: Path
) -> None:
    """Promise 1 with `kill -9`, one role after the other while the run continues."""
    folder = tmp_path / "run"
    with started(folder, model) as run:
        for steps, name in enumerate(("trainer", "rollout-0", "dispatch", "prompts"), start=2):
            run.wait_for(lambda: len(read(folder, "ledger", StepDone)) >= steps)  # noqa: B023
            run.kill(name)
        run.wait_complete()
    assert_the_log_adds_up(folder)
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.long
def test_an_interrupted_run_resumes_from_its_last_checkpoint(tmp_path: Path, model: Path) -> None:
    """Ctrl-C, then the same command again; with so many steps that no machine has finished by
    then.
    """
    folder, steps = tmp_path / "run", 30
    settings = [f"trainer.steps={steps}", "rollouts.count=1"]
    with started(folder, model, settings) as run:
        run.wait_for_step(5)
        assert run.newest().stop(signal.SIGINT) != 0
        assert len(read(folder, "ledger", StepDone)) < steps
        run.start()
        run.wait_complete()
    began = re.findall(r"resumes after step (\d+)", (folder / "logs" / "trainer.log").read_text())
    assert int(began[-1]) >= 4
    assert int(began[-1]) % 4 == 0
    assert_the_log_adds_up(folder, steps)


@pytest.mark.slow
def test_the_whole_run_killed_at_once_resumes(tmp_path: Path, model: Path) -> None:
    """Supervisor and all roles die together, then the same command again."""
    folder = tmp_path / "run"
    with started(folder, model) as run:
        run.wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 3)
        run.newest().kill()  # and no role outlives it
        run.start()
        run.wait_complete()
    assert_the_log_adds_up(folder)
