"""A plain run imports no option that its configuration does not name: who does not use an option
neither imports nor reads it. An option is a folder below a top one that is not listed as core, and
the graph of folders falls apart into fewer circles from issue to issue.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from testbed.repository import ROOT
from tests.support.sources import SOURCES, imported_sources

CORE = {
    "streams", "storage", "storage/stores", "storage/weights", "storage/weights/delta",
    "storage/starting_model", "producers", "producers/rollout", "producers/engines",
    "producers/rewards", "consumers", "consumers/dispatch", "consumers/trainer",
    "consumers/trainer/data", "consumers/trainer/learn", "consumers/objectives/losses",
}  # fmt: skip
CORE_FILES = {
    *(f"producers/tasks/{name}.py" for name in (
        "__init__", "base", "registry", "text", "text_tokenizer", "character_tokenizer",
        "trained_tokenizer", "remainder", "scripted", "automaton", "mixture",
    )),
    *(f"producers/dialogue/{name}.py" for name in (
        "__init__", "chat_template", "template_bounds", "template_messages",
    )),
}  # fmt: skip
"""Core among options: tasks of one's own, and the rendering of prompts in every text task."""
TOPS = ("streams", "storage", "producers", "consumers", "simulator")
NAMED = {"streams/sqlite", "producers/engines/torch", "consumers/objectives"}
"""What a plain run's configuration names: its log, its engine and its objective."""
ROLES = ("dispatch", "rollout", "train")
CIRCLES = 28
"""Folders that are in circles; the number falls to 0."""
LISTING = """
import importlib, json, sys
from rollstream.config.config import load
from rollstream.roles.catalogue import ROLES
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


def test_the_graph_of_folders_has_no_more_circles_than_are_left() -> None:
    """A file directly in `rollstream/` is used by all: it counts as a folder of its own."""
    arrows: dict[str, set[str]] = {}
    for path in SOURCES:
        for found, target in imported_sources(path):
            if not found.is_for_types and _room(path) != _room(target):
                arrows.setdefault(_room(path), set()).add(_room(target))
    reached = {room: _reached(room, arrows) for room in arrows}
    circular = sorted(room for room in arrows if room in reached[room])
    assert len(circular) <= CIRCLES, circular


def _is_option(file: Path) -> bool:
    return str(file.parent) not in CORE and str(file) not in CORE_FILES


def _relative(path: Path) -> Path:
    return path.relative_to(ROOT)


def _is_below_a_top(path: Path) -> bool:
    return _relative(path).parts[0] in TOPS


def _room(path: Path) -> str:
    file = _relative(path)
    return str(file if str(file.parent) == "rollstream" else file.parent)


def _reached(room: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """Returns the folders that one can come to from this one, itself only by a circle."""
    seen: set[str] = set()
    ahead = [*arrows.get(room, ())]
    while ahead:
        target = ahead.pop()
        if target not in seen:
            seen.add(target)
            ahead += arrows.get(target, ())
    return seen


def _in_repository(file: Path) -> Path | None:
    """Returns the file's path in one of the top folders; None for others. The package's links into
    them are followed.
    """
    try:
        path = file.resolve().relative_to(ROOT.resolve())
    except ValueError:
        return None
    return path if path.parts[0] in TOPS else None
