"""Runs are found by the names that people type, and a pipe is no terminal whatever is forced."""

import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from rollstream.api import open_run, publish
from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable
from rollstream.run.cli.main import main
from rollstream.run.console import TerminalConsole
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Annotation
from rollstream.streams.topics import catalogue
from testbed.repository import EXAMPLES


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a finished run, whose name is a time."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES / "archive", tmp_path / "runs" / "2026-11-29T19:08")
    return tmp_path


@pytest.mark.parametrize("form", [str, Path])
def test_a_run_is_opened_by_its_path_or_name(here: Path, form: type) -> None:
    assert open_run(form("runs/2026-11-29T19:08")).table("ledger").num_rows
    assert open_run("2026-11-29T19:08").table("ledger").num_rows


def test_a_name_with_a_colon_is_no_url(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", "2026-11-29T19:08", "ledger", "--json"]) == 0
    assert capsys.readouterr().out
    assert main(["ls", "runs/2026-11-29T19:08"]) == 0
    assert "2026-11-29T19:08" in capsys.readouterr().out
    assert main(["ls", "nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_forced_colour_makes_no_pipe_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = TerminalConsole()
    assert not console.redraws
    console.print(Text("word", "red"))
    assert pipe.getvalue() == "\x1b[31mword\x1b[0m\n"
    monkeypatch.delenv("FORCE_COLOR")
    TerminalConsole().print(Text("word", "red"))
    assert pipe.getvalue().endswith("\nword\n")


def test_an_annotation_stands_under_its_group(tmp_path: Path) -> None:
    bus = open_bus(f"sqlite:{tmp_path}/bus")
    bus.create(catalogue())
    note = Annotation("0.0", 0, "checked", np.array([1.0], np.float32), scorer="x")
    assert publish(bus, "annotations", "0", note).offset == 0
    for key, said in (("5", "its group, '0', got '5'"), (0, "a key is text, got 0")):
        with pytest.raises(ConfigurationError, match=said):
            publish(bus, "annotations", key, note)  # pyright: ignore[reportArgumentType]
    bus.close()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("my-reward:f", "rename what has other characters"),
        ("./rewards/mine.py:f", "e.g. rewards.mine:f"),
        ("../shared/mine.py:f", "put mine.py there, or its folder on PYTHONPATH"),
        ("code:reward", "which hides"),
    ],
)
def test_a_function_that_is_not_found_is_named_as_it_can_be(
    here: Path, named: str, said: str
) -> None:
    (here / "code.py").write_text("def reward(answer, reference): return 1.0\n")
    with pytest.raises(ConfigurationError, match=said):
        find_callable(named, "task.options.verifier")
