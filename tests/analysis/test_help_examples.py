"""Every example in the help of `query`, `tail` and `inspect` runs as written."""

import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from rollstream.run.cli.main import main, parse
from testbed.repository import ROOT
from testbed.waiting import WAIT_S

PROGRAM = [sys.executable, "-m", "rollstream"]


def examples(command, capsys):
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("rollstream ")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder whose `runs/quickstart-0` is a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "quickstart-0"


@pytest.mark.parametrize("command", ["query", "tail", "inspect"])
def test_the_examples_of_the_help_run(command, here, capsys):
    shutil.copytree(ROOT / "examples" / "archive", here)
    found = [words for words in examples(command, capsys) if "--follow" not in words]
    assert len(found) >= 2
    for words in found:
        assert main(words) == 0, words
        assert capsys.readouterr().out


def test_the_example_that_follows_runs_until_ctrl_c(here, folders, capsys):
    shutil.copytree(folders["live"], here)
    (words,) = [words for words in examples("tail", capsys) if "--follow" in words]
    process = subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "(UTC)" in process.stdout.readline()
    assert "0.0 of remainder: stop, reward 1" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
