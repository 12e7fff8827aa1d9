"""`python -m benchmarks --list` is complete: it has every case, and every file is reached."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import BENCHMARKS
from testbed.repository import ROOT

FOLDER = ROOT / "benchmarks"
STUDIES = ROOT / "studies"
CASES = {"Case", "alone", "paired", "against", "_at_most"}
BY_HAND = (
    *(f"benchmarks{folder}.__main__" for folder in ("", ".chaos", ".soak")),
    "studies.gpu_check.__main__",
    "studies.evidence_runs",
)
"""Files that are started from the Makefile or docs, besides those that these import or start."""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def stated_cases(path: Path) -> Iterator[tuple[str, bool]]:
    """Literal names of cases in a file, and whether the literal is only a prefix of a name."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            first = node.args[0]
            if node.func.id not in CASES:
                continue
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value:
                yield first.value, False
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
                yield str(first.values[0].value), True


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in (*FOLDER.rglob("*.py"), *STUDIES.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def reached_from(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of `known` that a file imports or names in a string (`-m`, a task, a folder, the name
    of a program's file).
    """
    found: set[str] = set()
    package = ".".join(path.parent.relative_to(ROOT).parts)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            found.add(f"{package}.{node.module}")  # of a program, which imports its neighbour
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"(?:benchmarks|studies)(?:\.\w+)+", node.value))
            if node.value.endswith(".py"):  # of a program
                found |= {name for name, one in known.items() if one.name == node.value}
            if node.value == "traced":
                found.add("benchmarks.resume.traced.sitecustomize")
    return found & set(known)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_case_is_listed_with_its_file(name: str) -> None:
    for file, goals in BENCHMARKS[name].files.items():
        stated = list(stated_cases(FOLDER / file))
        for case, partial in stated:
            listed = [one for one in goals if one.startswith(case) or BENCHMARKS[name].lists(case)]
            assert listed, f"{case} of {file}"
            assert partial or case in goals, f"{case} of {file}"
        text = (FOLDER / file).read_text(encoding="utf-8")
        for case in goals:
            beginnings = [case.rstrip("*")[:end] for end in range(len(case), 3, -1)]
            named = [one for one in beginnings if "_" in one or one == case]
            assert any(f'"{one}' in text for one in named), f"{case} of {file}"


def test_every_file_is_reached() -> None:
    known = modules()
    open_ = {*BY_HAND, *(one.module for one in BENCHMARKS.values())}
    for page in ("drafts.md", "simulator.md", "evidence.md"):
        text = (ROOT / "docs" / "explanation" / page).read_text(encoding="utf-8")
        open_ |= set(re.findall(r"(?:benchmarks|studies)(?:\.\w+)+", text))
    reached: set[str] = set()
    while open_ - reached:
        for name in (open_ - reached) & set(known):
            open_ |= reached_from(known[name], known)
            reached.add(name)
        open_ &= set(known)
    files = {name for name, path in known.items() if path.name != "__init__.py"}
    assert files - reached == set()


def test_list_prints_a_case_with_its_file_and_goal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    printed = capsys.readouterr().out.splitlines()
    assert ["bus_write", "bus", "benchmarks/streams/bus.py", "≥", "0.6", "×"] in map(
        str.split, printed
    )


@pytest.mark.slow
def test_the_functions_whose_cpu_time_is_counted_exist(tmp_path: Path):
    """`promise_cost` wraps functions of the product by name when their modules are loaded."""
    code = "import importlib, sitecustomize as s; [*map(importlib.import_module, s.SECTIONS)]"
    path = os.pathsep.join([str(FOLDER / "resume" / "traced"), str(ROOT)])
    given = {**os.environ, "PYTHONPATH": path, "CPU_COUNTED_IN": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
