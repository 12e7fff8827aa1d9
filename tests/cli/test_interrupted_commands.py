"""Ctrl-C ends every command at once and without a word, also within its imports and in DuckDB."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.run.cli import main as command_line, run
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.console import TerminalConsole
from rollstream.run.supervisor.supervisor import RunOutcome
from testbed.first_hour.looked_at_run import copied_run
from testbed.repository import ROOT
from testbed.waiting import WAIT_S

HEAVY = (
    "SELECT * FROM generate_series(1,100000000) a, generate_series(1,100000) b ORDER BY random() "
    "LIMIT 1"
)
QUERY = """
import sys, threading
from rollstream.run.cli.main import main

class Told(threading.Thread):
    def start(self):
        if self.name == "query":
            print("running", file=sys.stderr, flush=True)
        super().start()

threading.Thread = Told
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_ends_a_heavy_query(tmp_path: Path) -> None:
    """Without the interruption, the query would take days."""
    run = copied_run(tmp_path / "run")
    words = [sys.executable, "-c", QUERY, "query", str(run), HEAVY]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as query:
        assert query.stderr is not None
        assert query.stderr.readline() == "running\n"
        query.send_signal(signal.SIGINT)
        assert query.wait(WAIT_S) == 130
        assert query.stderr.read() == ""


INTERRUPTED_IMPORT = """
import runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupting())
sys.argv = ["rollstream", "query", "--tables"]
runpy.run_module("rollstream", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["rollstream.run.cli.main", "rollstream.printable", "duckdb"])
def test_ctrl_c_within_an_import_is_silent(name: str) -> None:
    code = INTERRUPTED_IMPORT.format(name=name)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_ctrl_c_is_found_behind_the_error_of_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: object) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr(command_line, "_command", interrupted)
    assert command_line.main(["ls"]) == 130


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_warm_up_advises_to_resume(tmp_path: Path) -> None:
    words = ["-m", "rollstream", "run", str(ROOT / "examples" / "quickstart.toml"), "--run", "run"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert any(line.startswith("warm-up:") for line in run.stdout)
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "stopped; the same command resumes\n"
        assert run.wait(WAIT_S) == 130


def test_a_signal_ends_the_summary_of_a_run_and_not_the_reason_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "open_history", lambda folder: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # as during the run
    try:
        run._end(RunFolder(tmp_path), RunOutcome("failed", "the reason"), TerminalConsole(), False)
    finally:
        signal.signal(signal.SIGTERM, before)
    errors = capsys.readouterr().err
    assert "the summary was interrupted; `rollstream report" in errors
    assert errors.endswith("rollstream: the reason\n")
