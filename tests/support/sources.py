"""The product's files, what each imports, and what it calls."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

from testbed.repository import ROOT

FOLDERS = ("streams", "storage", "producers", "consumers", "simulator", "rollstream")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


class Import(NamedTuple):
    """A name that a statement imports, in full, and where."""

    name: str
    level: int
    line: int
    is_for_types: bool
    """Whether it stands under TYPE_CHECKING."""


@functools.cache
def read(path: Path) -> tuple[list[Import], set[str]]:
    """A file's imports, anywhere in it, and the names of the functions that it calls."""
    imports: list[Import] = []
    called: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            imports += (Import(name, 0, node.lineno, node in for_types) for name in names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            imports += (Import(name, node.level, node.lineno, node in for_types) for name in names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return imports, called


def module_of(path: Path) -> str:
    """The name under which a source is imported; a package's for its `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    below = parts if parts[0] == "rollstream" else ("rollstream", *parts)
    return ".".join(below[:-1] if below[-1] == "__init__" else below)


MODULES = {module_of(path): path for path in SOURCES}


def imported_sources(path: Path) -> list[tuple[Import, Path]]:
    """The imports of a file that are sources, each with its file."""
    imports = read(path)[0]
    targets = [(i, i.name if i.name in MODULES else i.name.rpartition(".")[0]) for i in imports]
    return [(found, MODULES[module]) for found, module in targets if module in MODULES]
