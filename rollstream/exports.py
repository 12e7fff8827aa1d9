"""Imports names for user code on first use (PEP 562), so that importing a package never imports
torch, DuckDB or a Kafka client.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy_exports(package: str) -> Callable[[str], object]:
    """A `__getattr__` that imports the names declared under `TYPE_CHECKING`."""

    def load(name: str) -> object:
        module = _declared(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module), name)

    return load


@cache
def _declared(package: str) -> Mapping[str, str]:
    source = Path(sys.modules[package].__file__ or "").read_text(encoding="utf-8")
    return {
        alias.name: node.module
        for part in ast.parse(source).body
        if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"
        for node in part.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
