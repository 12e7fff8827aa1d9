"""A plain run imports no option that its configuration does not name: who does not use an option
neither imports nor reads it. An option is a folder below a top one that is not listed as core, and
the graph of folders falls apart into fewer circles from issue to issue.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from testbed.repository import ROOT

CORE = {
    "streams", "storage", "storage/stores", "storage/weights", "storage/weights/delta",
    "storage/starting_model", "producers", "producers/rollout", "producers/engines",
    "producers/rewards", "consumers", "consumers/dispatch", "consumers/trainer",
    "consumers/trainer/data", "consumers/trainer/learn",
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
NAMED = {"streams/sqlite", "producers/engines/torch"}
"""What a plain run's configuration names: its log and its engine."""
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
    modules = {_module(file): file for file in product_files()}
    named = [
        f"{file}:{line} -> {modules[target]}"
        for file in modules.values()
        if file.parts[0] in TOPS and not _is_option(file)
        for line, target in _imports(file, modules, with_types=True)
        if modules[target].parts[0] in TOPS and _is_option(modules[target])
    ]
    assert named == []


def test_the_graph_of_folders_has_no_more_circles_than_are_left() -> None:
    """A file directly in `rollstream/` is used by all: it counts as a folder of its own."""
    modules = {_module(file): file for file in product_files()}
    arrows: dict[str, set[str]] = {}
    for file in modules.values():
        for _, target in _imports(file, modules, with_types=False):
            if _room(file) != _room(modules[target]):
                arrows.setdefault(_room(file), set()).add(_room(modules[target]))
    reached = {room: _reached(room, arrows) for room in arrows}
    circular = sorted(room for room in arrows if room in reached[room])
    assert len(circular) <= CIRCLES, circular


def product_files() -> list[Path]:
    """Returns the product's files, relative to the repository, each once."""
    paths = [path for top in (*TOPS, "rollstream") for path in (ROOT / top).rglob("*.py")]
    return [
        path.relative_to(ROOT)
        for path in paths
        if path.resolve().is_relative_to(ROOT)
        and path.resolve() == ROOT.resolve() / path.relative_to(ROOT)
    ]


def _is_option(file: Path) -> bool:
    return str(file.parent) not in CORE and str(file) not in CORE_FILES


def _room(file: Path) -> str:
    return str(file if str(file.parent) == "rollstream" else file.parent)


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    parts = parts if parts[0] == "rollstream" else ("rollstream", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(
    file: Path, modules: Mapping[str, Path], with_types: bool
) -> Iterator[tuple[int, str]]:
    """Yields the line and module of each import of the repository's own modules."""
    tree = ast.parse((ROOT / file).read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types and not with_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [
                inner if (inner := f"{node.module}.{alias.name}") in modules else node.module
                for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name in modules)


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
