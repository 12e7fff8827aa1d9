"""A plain run imports no option that its configuration does not name: who does not use an option
neither imports nor reads it. An option is a folder below a top one that is not listed as core, and
no folders import each other in a circle.
"""

import json
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from testbed.repository import ROOT
from tests.support.sources import SOURCES, imported_sources

CORE = {
    "streams", "storage", "storage/stores", "storage/weights", "storage/weights/delta",
    "storage/starting_model", "storage/model_folder", "producers", "producers/rollout",
    "producers/engines",
    "producers/rewards", "consumers", "consumers/dispatch", "consumers/trainer",
    "consumers/trainer/data", "consumers/trainer/learn", "consumers/objectives/losses",
}  # fmt: skip
CORE_FILES = {
    *(f"producers/tasks/{name}.py" for name in (
        "__init__", "base", "registry", "text", "character_tokenizer",
        "trained_tokenizer", "remainder", "scripted", "automaton", "mixture", "code_environment",
    )),
    *(f"producers/dialogue/{name}.py" for name in (
        "__init__", "chat_template", "template_bounds", "template_messages", "text_tokenizer",
    )),
}  # fmt: skip
"""Core among options: tasks of one's own, and the rendering of prompts in every text task."""
TOPS = ("streams", "storage", "producers", "consumers", "simulator")
NAMED = {"streams/sqlite", "producers/engines/torch", "consumers/objectives"}
"""What a plain run's configuration names: its log, its engine and its objective."""
ROLES = ("dispatch", "rollout", "train")
LISTING = """
import importlib, json, sys
from rollstream.run.config.config import load
from rollstream.run.role_catalogue import ROLES
c = load(sys.argv[2], [])
ROLES[sys.argv[1]].load()
if sys.argv[1] == "dispatch":
    import rollstream.consumers.dispatch.service
    from rollstream.consumers.dispatch.policy import ASSIGNMENT_POLICIES
    importlib.import_module(ASSIGNMENT_POLICIES[c.dispatch.placement].partition(":")[0])
if sys.argv[1] == "train":
    from rollstream.consumers.trainer.learn.objective import OBJECTIVES, SURROGATE
    objective = OBJECTIVES.get(c.trainer.advantage, SURROGATE)
    importlib.import_module(objective.partition(":")[0])
if sys.argv[1] == "rollout":
    importlib.import_module("rollstream.producers.rollout.single_turn")
files = [str(getattr(module, "__file__", "") or "") for module in sys.modules.values()]
print(json.dumps(files))
"""


@pytest.mark.parametrize("role", ROLES)
def test_a_role_of_a_plain_run_imports_no_option(role: str) -> None:
    plain = ROOT / "examples" / "quickstart.toml"
    done = subprocess.run(
        [sys.executable, "-c", LISTING, role, str(plain)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [Path(file) for file in json.loads(done.stdout.splitlines()[-1]) if file]
    imported = {str(file) for file in map(_in_repository, files) if file is not None}
    assert len(imported) > 50
    named = {file for file in imported if str(Path(file).parent) in NAMED}
    assert [file for file in sorted(imported - named) if _is_option(Path(file))] == []


def test_a_run_imports_nothing_of_the_simulator_nor_of_planning() -> None:
    """The command that starts, watches and shows a run, its checks and all roles; a file that turns
    out to configure a simulation is named so.
    """
    commands = {f"rollstream/run/cli/{name}.py" for name in ("plan", "profile", "simulate", "tune")}
    named = {
        str(_relative(path))
        for path in SOURCES
        for _, target in imported_sources(path)
        if _relative(path).parts[:2] in (("rollstream", "run"), ("rollstream", "keep"))
        and (_relative(target).parts[0] == "simulator" or _relative(target).parts[1] == "plan")
    }
    assert named - commands == {"rollstream/run/config/file_kind.py"}


def test_no_core_file_names_an_option() -> None:
    """No import statement at any depth, nor one for types alone."""
    named = [
        f"{_relative(path)}:{found.line} -> {_relative(target)}"
        for path in SOURCES
        if _is_below_a_top(path) and not _is_option(_relative(path))
        for found, target in imported_sources(path)
        if _is_below_a_top(target) and _is_option(_relative(target))
    ]
    assert named == []


def test_the_graph_of_folders_has_no_circle() -> None:
    """A file directly in `rollstream/` is used by all: it counts as a folder of its own."""
    arrows: dict[str, set[str]] = {}
    for path in SOURCES:
        for found, target in imported_sources(path):
            if not found.is_for_types and _room(path) != _room(target):
                arrows.setdefault(_room(path), set()).add(_room(target))
    assert len(arrows) > 50
    TopologicalSorter(arrows).prepare()  # a CycleError names the folders


def _is_option(file: Path) -> bool:
    return str(file.parent) not in CORE and str(file) not in CORE_FILES


def _relative(path: Path) -> Path:
    return path.relative_to(ROOT)


def _is_below_a_top(path: Path) -> bool:
    return _relative(path).parts[0] in TOPS


def _room(path: Path) -> str:
    file = _relative(path)
    return str(file if str(file.parent) == "rollstream" else file.parent)


def _in_repository(file: Path) -> Path | None:
    """Returns the file's path in one of the top folders; None for others. The package's links into
    them are followed.
    """
    try:
        path = file.resolve().relative_to(ROOT.resolve())
    except ValueError:
        return None
    return path if path.parts[0] in TOPS else None
