"""`--log json`: a role's log is one JSON object a line, also for the error that ends it."""

import json
import logging
import sys
from datetime import datetime
from pathlib import Path

import pytest

from rollstream.run.cli.main import main
from rollstream.run.cli.role import JsonLogFormatter

FIELDS = ["time", "level", "logger", "role", "name", "run", "message", "exception"]


def record(message: str, *arguments: object, failed: bool = False) -> logging.LogRecord:
    at = sys.exc_info() if failed else None
    return logging.LogRecord("here", logging.WARNING, "", 0, message, arguments, at)


def test_a_record_is_one_line_with_its_fields() -> None:
    formatter = JsonLogFormatter("rollout", "rollout-3")
    formatter.run = "lab"
    (line,) = formatter.format(record("two\nlines of %s", "text")).splitlines()
    found = json.loads(line)
    assert list(found) == FIELDS
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {
        "level": "WARNING", "logger": "here", "role": "rollout", "name": "rollout-3",
        "run": "lab", "message": "two\nlines of text", "exception": None,
    }  # fmt: skip


def test_an_exception_is_inside_the_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonLogFormatter("train", "trainer").format(record("failed", failed=True))
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: broken")


@pytest.fixture
def log_of_root() -> object:
    """The root logger's handlers are those of before after the test."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield root
    root.handlers, root.level = handlers, level


def test_the_error_that_ends_a_role_is_a_line_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log_of_root: object
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[trainer]\nlrr = 1\n")
    assert main(["prompts", str(toml), "--log", "json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["level"], found["role"], found["run"]) == ("ERROR", "prompts", "")
    assert found["message"].startswith("unknown key trainer.lrr in run.toml; nearest known")


def test_a_text_log_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log_of_root: object
) -> None:
    assert main(["prompts", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err.startswith("rollstream: no configuration file")
