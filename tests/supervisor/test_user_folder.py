"""A run works in a folder that holds the user's own `storage.py` or `queue.py`, and import names of
release 0.1 are refused with the new name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.import_path import OLD_ROOTS, find_callable, module_environment
from testbed.run_driver import RunDriver
from testbed.run_process import SETTINGS
from testbed.waiting import WAIT_S

TASK = """
import queue, storage
from rollstream.producers.tasks.remainder import Remainder

class Mine(Remainder):
    name = storage.NAME if queue.Queue else ""
"""
CONFIGURATION = """
[task]
name = "mine:Mine"
[model]
path = "{model}"
"""


def clean_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def user_folder(tmp_path: Path, model: Path) -> Path:
    """A folder whose modules have the names of our folders, and one of the standard library's."""
    for name in (*OLD_ROOTS, "queue", "logging"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'mine'\nassert __name__ == {name!r}\n")
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "run.toml").write_text(CONFIGURATION.format(model=model))
    return tmp_path


@pytest.mark.slow
def test_a_run_works_beside_user_modules_that_are_named_like_our_folders(user_folder: Path):
    settings = [*SETTINGS, "trainer.steps=2", "rollouts.count=1"]
    line = RunDriver(Path("run"), Path("run.toml"), settings).line()
    line[1:1] = ["-P"]
    done = subprocess.run(
        line,
        cwd=user_folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = (user_folder / "run" / "config.json").read_text()
    assert "mine:Mine" in config


@pytest.mark.parametrize("words", [["--help"], ["check", "run.toml"]], ids=" ".join)
def test_a_command_works_beside_such_modules(user_folder: Path, words: list[str]):
    """The check imports the user's task in a process of its own, as a run does."""
    line = [str(Path(sys.executable).parent / "rollstream"), *words]
    done = subprocess.run(line, cwd=user_folder, env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("producers.tasks.gym:Gym", "'rollstream.producers.tasks.gym'"),
        ("producers.tasks.base:Task", "'rollstream.api'"),
        ("consumers.trainer.choice:oldest", "'rollstream.consumers.trainer.data.selection'"),
    ],
)
def test_a_setting_with_an_import_name_of_before_is_refused_with_the_new_one(path: str, new: str):
    with pytest.raises(ConfigurationError, match=f"since release 0.2 it is imported as {new}"):
        find_callable(path, "task.name")


def test_a_users_module_that_imports_a_moved_folder_is_refused_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "looks.py").write_text("from rollstream.monitor.state import RunState")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"'rollstream\.monitor' is part of 'rollstream\.look'"
    ):
        find_callable("looks:RunState", "task.name")


def test_a_users_module_that_imports_a_name_of_before_is_refused_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "older.py").write_text("from streams.connect import open_bus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(ConfigurationError, match="'rollstream"):
        find_callable("older:open_bus", "task.name")


def test_children_of_an_uninstalled_checkout_find_it(monkeypatch: pytest.MonkeyPatch):
    import rollstream

    root = str(Path(rollstream.__file__).resolve().parents[1])
    monkeypatch.setattr(sys, "path", [root, "elsewhere"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert module_environment() == {"PYTHONPATH": root}
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    assert module_environment() == {}
