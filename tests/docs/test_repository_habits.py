"""Hooks and workflows run what the Makefile runs; docs and examples import the names that users are
promised.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent

import yaml

from testbed.repository import EXAMPLES, ROOT


def _recipe(target: str) -> list[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]


def test_the_hooks_run_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    assert entries == _recipe("check")


def test_the_workflow_runs_check_and_test() -> None:
    text = (ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8")
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == ["make check", "make test"]


def test_the_changelog_has_this_release() -> None:
    from rollstream.streams.release import RELEASE

    assert f"## {RELEASE}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _programs() -> list[tuple[Path, str]]:
    """The Python programs of examples and documents."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    blocks = [
        (page, dedent(block))
        for page in pages
        for block in re.findall(
            r"^ *```python\n(.*?)^ *```$",
            page.read_text(encoding="utf-8"),
            re.DOTALL | re.MULTILINE,
        )
    ]
    files = [(file, file.read_text(encoding="utf-8")) for file in EXAMPLES.rglob("*.py")]
    return [*blocks, *files]


def test_docs_and_examples_import_the_api_alone() -> None:
    programs = _programs()
    assert len(programs) > 15
    imported = {
        (where.relative_to(ROOT).as_posix(), name)
        for where, text in programs
        for node in ast.walk(ast.parse(text))
        for name in _modules(node)
        if name.partition(".")[0] == "rollstream"
    }
    assert {name for _, name in imported} >= {"rollstream.api"}
    assert {one for one in imported if one[1] not in ("rollstream", "rollstream.api")} == set()


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
