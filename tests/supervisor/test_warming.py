"""The warm-up phase of a run: it runs once, is watched, and a failure gives its reason."""

import io
import sys

import pytest
from rich.console import Console

from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.signals import StopSignals
from rollstream.run.supervisor.process import ProcessSpec
from rollstream.run.supervisor.supervisor import RunLock
from rollstream.run.warmup.process import WarmupFailed, WarmupProcess, newest_progress


@pytest.fixture
def warming(tmp_path):
    lock = RunLock(tmp_path)

    def make(code: str) -> WarmupProcess:
        seat = ProcessSpec("warmup", [sys.executable, "-c", code])
        console = Console(file=io.StringIO(), force_terminal=True)
        return WarmupProcess(Configuration(), RunFolder(tmp_path), seat, console, lock)

    yield make
    lock.close()


def test_a_model_is_made_once(warming, tmp_path):
    code = f"import os; os.mkdir({str(tmp_path / 'model')!r}); print('once')"
    assert warming(code).run(StopSignals())
    assert warming("raise SystemExit('never started')").run(StopSignals())
    assert (tmp_path / "logs" / "warmup.log").read_text() == "once\n"


def test_a_failure_quotes_the_end_of_its_log(warming):
    with pytest.raises(WarmupFailed, match=r"(?s)exit code 1.*\| no chalk"):
        warming("raise SystemExit('no chalk')").run(StopSignals())


def test_a_warm_up_that_made_nothing_failed(warming):
    with pytest.raises(WarmupFailed, match="exit code 0"):
        warming("pass").run(StopSignals())


def test_ctrl_c_ends_it(warming):
    signals = StopSignals()
    signals.stop.set()
    assert not warming("import time; time.sleep(600)").run(signals)


def test_progress_is_the_last_whole_line_of_its_log(tmp_path):
    log = tmp_path / "warmup.log"
    assert newest_progress(log) is None
    log.write_text('{"done": 1, "steps": 9, "loss": 2.5}\na warning\n{"done": 2, "st')
    assert newest_progress(log) == {"done": 1, "steps": 9, "loss": 2.5}
