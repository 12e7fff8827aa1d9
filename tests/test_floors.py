"""The floors of DESIGN.md hold: a file imports only from floors below its own and from its own
package, and each foreign client is imported in one file.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

from testbed.repository import ROOT

BELOW = {
    "streams": set(),
    "storage": {"streams"},
    "producers": {"streams", "storage"},
    "consumers": {"streams", "storage"},
    "simulator": {"streams", "storage", "producers", "consumers"},
    "rollstream": {"streams", "storage", "producers", "consumers", "simulator"},
}
ONE_FILE = {"kafka", "boto3", "botocore", "vllm"}
SOURCES = sorted(path for package in BELOW for path in (ROOT / package).rglob("*.py"))


@functools.cache
def read(path: Path) -> tuple[list[tuple[str, int]], set[str]]:
    """Top-level names that a file imports, anywhere in it, each with the level of the import; and
    the names that it calls.
    """
    imported: list[tuple[str, int]] = []
    called: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += ((alias.name.split(".")[0], 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.append(((node.module or "").split(".")[0], node.level))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return imported, called


def imports(path: Path) -> list[tuple[str, int]]:
    return read(path)[0]


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} >= set(BELOW)


def test_a_file_imports_only_from_floors_below_and_from_its_own_package():
    wrong: list[str] = []
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[0]
        for name, _ in imports(path):
            if name in BELOW and name != package and name not in BELOW[package]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_source_imports_tests_testbed_benchmarks_or_examples():
    above = {"tests", "testbed", "benchmarks", "examples"}
    wrong = [str(path) for path in SOURCES if above & {name for name, _ in imports(path)}]
    assert wrong == []


def test_testbed_imports_no_test_and_no_benchmark_and_benchmarks_no_test():
    forbidden = {"testbed": {"tests", "benchmarks"}, "benchmarks": {"tests"}}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package, above in forbidden.items()
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, _ in imports(path)
        if name in above
    ]
    assert wrong == []


def test_imports_are_absolute():
    relative = [str(path) for path in SOURCES if any(level for _, level in imports(path))]
    assert relative == []


def test_each_foreign_client_is_imported_in_at_most_one_file():
    users: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for name, _ in imports(path):
            if name in ONE_FILE:
                users[name].add(str(path.relative_to(ROOT)))
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


def test_nothing_is_pickled_or_evaluated():
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong: list[str] = []
    for path in SOURCES:
        wrong += [f"{path}: {name}" for name, _ in imports(path) if name in forbidden]
        wrong += [f"{path}: {name}" for name in read(path)[1] & {"eval", "exec"}]
    assert wrong == []
