"""Tasks are found by name or import path; errors name the remedy."""

import sys
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Task
from rollstream.producers.tasks.registry import load_task
from rollstream.producers.tasks.remainder import Remainder
from rollstream.producers.tasks.text import TaskText


class Worded(Remainder):
    """A user's own task that needs the run's tokenizer."""

    def __init__(self, text: TaskText) -> None:
        super().__init__()
        self.text = text


def load(name: str, **options: float | str) -> Task:
    return load_task(TaskSettings(name=name, options=dict(options)))


def test_a_registered_name_builds_the_task_with_its_options():
    task = load("remainder", direct=0.5)
    assert isinstance(task, Remainder)
    assert task.name == "remainder"


def test_an_import_path_builds_ones_own_task():
    assert load("tests.tasks.odd_tasks:Odd").name == "odd"


def test_a_task_that_takes_text_is_given_tokenizer_and_template():
    task = load("tests.tasks.test_task_registry:Worded")
    assert task.text.tokenizer.size == 262  # pyright: ignore


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_own_task.py").write_text("from tests.tasks.odd_tasks import Odd as Mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load("my_own_task:Mine").name == "odd"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("remainer", {}, "did you mean 'remainder'"),
        (
            "zzz",
            {},
            "registered: automaton, dataset, mixture, numbered, reasoning_gym, remainder, scripted",
        ),
        ("odd_taskz:Odd", {}, "module 'odd_taskz' cannot be imported"),
        (":Odd", {}, "write it as `module:attribute`"),
        ("tests.tasks.odd_tasks:Od", {}, "no callable 'Od'; did you mean 'Odd'"),
        ("tests.tasks.odd_tasks:math", {}, "has 'math', which is not callable"),
        ("tests.tasks.odd_tasks:Path", {}, "without stop, tokenizer"),
        ("remainder", {"directt": 0.5}, "no option 'directt'; did you mean 'direct'?"),
        ("remainder", {"zzz": 0.5}, "no option 'zzz'; known: direct, jump"),
        ("remainder", {"direct": "much"}, "task.options of remainder: '<' not supported"),
        ("dataset", {"prompt": "x"}, "task.options of dataset: give path"),
    ],
)
def test_a_mistake_is_named(name: str, options: dict[str, float], message: str):
    with pytest.raises(ConfigurationError) as caught:
        load(name, **options)
    assert message in str(caught.value)


def test_a_module_that_fails_on_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_task.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="importing 'broken_task' failed with ZeroDiv"):
        load("broken_task:Task")


def test_a_module_whose_own_import_is_missing_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "lacks_import.py").write_text("import nowhere_to_be_seen\n")
    (tmp_path / "wrong_name.py").write_text("from json import no_such_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, words in (
        ("lacks_import", "the module was found, but it imports 'nowhere_to_be_seen'"),
        ("wrong_name", "the module was found, but one of its imports fails"),
        ("not_there", "or on PYTHONPATH"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            find_callable(f"{name}:f", "task.options.verifier")
