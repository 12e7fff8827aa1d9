"""The floors of docs/reference/invariants.md hold: a file imports only from floors below its own
and from its own package, no imports form a cycle, and each foreign client is imported in one file.
A folder has at most two dozen files.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from testbed.repository import ROOT
from tests.support.sources import FOLDERS, SOURCES, imported_sources, read

BELOW: dict[str, set[str]] = {
    "base": set(),
    "streams": set(),
    "storage": {"streams"},
    "producers": {"streams", "storage"},
    "consumers": {"streams", "storage"},
    "simulator": {"streams", "storage", "producers", "consumers"},
    "rollstream": {"streams", "storage", "producers", "consumers", "simulator"},
}
BASE = {
    "contained_folder", "errors", "deadline", "exports", "foreign_json",
    "http_connections", "http_guard", "http_proxies", "http_server", "import_path",
    "metric_values", "os_failures", "printable", "private_state", "program_output",
    "temporary_folder", "whole_file",
}  # fmt: skip
"""Floor 0: modules directly in `rollstream/` that every floor may import."""
EXPORTS = {"__init__", "api"}
"""Files that only export; `rollstream/api.py` is what users import."""
ONE_FILE = {"kafka", "boto3", "botocore", "vllm"}
FILES_MAX = 24
"""Python files directly in one folder, without its `__init__.py`."""
ALIKE = {"consumers/objectives/losses": {"base", "kinds"}}
"""Folders whose files are one kind of thing, found by their names, except for these."""
BESIDE = ("tests", "benchmarks", "studies", "testbed", "examples")


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    is_base = parts[0] == "rollstream" and len(parts) == 2 and path.stem in BASE
    return "base" if is_base else parts[0]


def floor_of(name: str) -> str | None:
    """The package of an imported name; None where it is foreign or floor 0."""
    parts = name.split(".")
    if parts[0] != "rollstream" or len(parts) == 1:
        return None
    if parts[1] in BASE:
        return None
    return parts[1] if parts[1] in BELOW else "rollstream"


def roots(path: Path) -> set[str]:
    return {found.name.split(".")[0] for found in read(path)[0]}


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} >= set(FOLDERS)


def test_a_file_imports_only_from_floors_below_and_from_its_own_package():
    wrong: list[str] = []
    for path in SOURCES:
        package = package_of(path)
        for name in (found.name for found in read(path)[0]):
            floor = floor_of(name)
            if floor and floor != package and floor not in BELOW[package]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_everything_is_imported_below_one_root():
    bare = set(FOLDERS) - {"rollstream"}
    everywhere = [*SOURCES, *(p for top in BESIDE for p in (ROOT / top).rglob("*.py"))]
    assert [str(path) for path in everywhere if bare & roots(path)] == []


def test_no_source_imports_what_stands_beside_the_product():
    assert [str(path) for path in SOURCES if set(BESIDE) & roots(path)] == []


def test_benchmarks_studies_and_testbed_import_no_tests():
    paths = [p for top in ("benchmarks", "studies", "testbed") for p in (ROOT / top).rglob("*.py")]
    assert [str(path) for path in paths if "tests" in roots(path)] == []


def test_imports_are_absolute():
    relative = [str(path) for path in SOURCES if any(found.level for found in read(path)[0])]
    assert relative == []


def test_the_names_of_user_code_are_imported_when_they_are_used():
    api = importlib.import_module("rollstream.api")
    checks = importlib.import_module("rollstream.consumers.trainer.data.rule_checks")
    assert api.check_choice is checks.check_choice
    with pytest.raises(AttributeError, match="has no attribute 'Mislaid'"):
        _ = api.Mislaid


def test_only_what_user_code_imports_is_exported_by_another_module():
    lazy = [path for path in SOURCES if "lazy_exports" in path.read_text(encoding="utf-8")]
    names = {str(path.relative_to(ROOT)) for path in lazy}
    assert names == {
        "rollstream/api.py", "rollstream/exports.py", "producers/sandbox/__init__.py",
    }  # fmt: skip


def test_a_module_never_imports_its_own_package():
    """Inside a package one imports the module."""
    wrong: list[str] = []
    for path in SOURCES:
        own = ".".join(path.relative_to(ROOT).parent.parts)
        own = own if own.split(".")[0] == "rollstream" else f"rollstream.{own}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == own and path.stem not in EXPORTS:
                names = {alias.name for alias in node.names}
                modules = {p.stem for p in path.parent.iterdir()}
                wrong += [f"{path.relative_to(ROOT)}: {name}" for name in names - modules]
    assert wrong == []


def test_no_imports_form_a_cycle():
    """Imports inside functions and under TYPE_CHECKING count."""
    graph = {
        path: {target for _, target in imported_sources(path) if target != path} for path in SOURCES
    }
    assert sum(map(len, graph.values())) > len(SOURCES)
    TopologicalSorter(graph).prepare()  # a CycleError names the files


def test_a_folder_has_at_most_two_dozen_files():
    beside = (path for top in BESIDE for path in (ROOT / top).rglob("*.py"))
    every = (path for path in [*SOURCES, *beside] if path.stem != "__init__")
    files = Counter(path.relative_to(ROOT).parent for path in every)
    assert {str(folder): n for folder, n in files.items() if n > FILES_MAX} == {}


def test_each_foreign_client_is_imported_in_at_most_one_file():
    users: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for name in roots(path) & ONE_FILE:
            users[name].add(str(path.relative_to(ROOT)))
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rollstream.run.roles.rollout", "transformers"),
        ("rollstream.run.roles.train", "transformers"),
        ("rollstream.producers.engines.torch.engine", "transformers.modeling_utils"),
    ],
)
def test_a_role_imports_no_code_of_models_that_it_may_not_need(module: str, heavy: str):
    """Every process of a run would pay seconds for it at its start: a paced run has no model, and
    the fused decoder needs only the configuration of one.
    """
    code = f"import sys, {module}; print({heavy!r} in sys.modules, {module!r} in sys.modules)"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_nothing_is_pickled_or_evaluated():
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong: list[str] = []
    for path in SOURCES:
        wrong += [f"{path}: {name}" for name in roots(path) & forbidden]
        wrong += [f"{path}: {name}" for name in read(path)[1] & {"eval", "exec"}]
    assert wrong == []


@pytest.mark.parametrize("init", [path for path in SOURCES if path.name == "__init__.py"], ids=str)
def test_a_package_says_what_is_inside(init: Path) -> None:
    described = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    inside = [path.stem for path in init.parent.glob("*.py") if not path.stem.startswith("__")]
    inside = [*ALIKE.get(str(init.parent.relative_to(ROOT)), inside)]
    inside += [path.parent.name for path in init.parent.glob("*/__init__.py")]
    links = {path.name for path in init.parent.iterdir() if path.is_symlink()}
    words = set(re.findall(r"\w+", described))
    assert sorted(set(inside) - links - words) == []
