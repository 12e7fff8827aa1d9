"""Lets a module with names for user code import them on first use (PEP 562), so importing it never
imports torch, DuckDB or a Kafka client. They are declared once, by its imports under
`TYPE_CHECKING`; all other code imports from the defining module.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy_exports(package: str) -> Callable[[str], object]:
    """Returns a `__getattr__` that imports the package's names declared under `TYPE_CHECKING`."""

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
