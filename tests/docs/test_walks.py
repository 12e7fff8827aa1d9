"""Each `file:function` of docs/explanation/architecture.md exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
WALKS = ("trajectory", "step", "version", "move", "crash", "question")
STATION = re.compile(r"`([\w/]+\.py):([\w.]+)`")
FILE = re.compile(r"`([\w/]+\.py)`")


@cache
def definitions(path: str) -> frozenset[str]:
    """The functions and classes of a file; methods as `Class.method`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return frozenset(names)


def walk(name: str) -> str:
    _, found, rest = PAGE.read_text(encoding="utf-8").partition(f"### Follow a {name}\n")
    assert found, f"no walk of a {name}"
    return re.split(r"\n##", rest)[0]


@pytest.mark.parametrize("name", WALKS)
def test_each_station_of_a_walk_exists(name: str) -> None:
    stations = STATION.findall(walk(name))
    assert len(stations) >= 6
    missing = [f"{path}:{what}" for path, what in stations if what not in definitions(path)]
    assert missing == []


def test_each_file_that_the_page_names_exists() -> None:
    files = FILE.findall(PAGE.read_text(encoding="utf-8"))
    beside = ROOT / "rollstream"  # in the row of floor 0, names beside `rollstream/errors.py`
    assert [
        one for one in files if not (ROOT / one).is_file() and not (beside / one).is_file()
    ] == []
