"""Every number of the arithmetic has a docstring of its own, which names its source or that it is a
choice.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from testbed.repository import ROOT

SOURCE = re.compile(
    r"""\w\.(py|md|cpp)\b          # code that has the number, or a page with its measurement
    |arXiv|§|\bA\ choice\b       # a paper, or a choice with its reason
    |vLLM|torch|NCCL             # a library's documentation or default
    |data\ sheet|Specification|IEEE|\(SI\)|NVIDIA
    |default\ of\ `""",
    re.VERBOSE,
)


def numbers() -> Iterator[tuple[str, str]]:
    """Names of the module-level constants with a number in their value, each with its docstring."""
    folders = ROOT / "rollstream" / "run" / "sizes", ROOT / "rollstream" / "plan"
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in zip(body, [*body[1:], ast.Pass()], strict=True):
            if not isinstance(statement, ast.Assign) or isinstance(statement.value, ast.Call):
                continue
            if not any(
                isinstance(one, ast.Constant) and isinstance(one.value, int | float)
                for one in ast.walk(statement.value)
            ):
                continue
            name = f"{path.stem}.{ast.unparse(statement.targets[0])}"
            if name not in TABLES:
                text = after.value if isinstance(after, ast.Expr) else None
                yield name, str(text.value) if isinstance(text, ast.Constant) else ""


TABLES = {
    "devices._CARDS": "its module names NVIDIA's data sheets",
    "shapes._TABLE": "the models' published `config.json`, compared in test_shapes.py",
}


@pytest.mark.parametrize(("name", "text"), [*numbers()])
def test_a_constant_names_its_source(name: str, text: str) -> None:
    assert SOURCE.search(" ".join(text.split())), f"{name}: {text!r} names no source"


def test_the_constants_are_found() -> None:
    found = {name for name, _ in numbers()}
    assert {"arithmetic.CONTEXT_BYTES", "devices.PCIE", "engines.ENGINE_SHARE"} <= found
