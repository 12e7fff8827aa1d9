"""Hooks and workflows run what the Makefile runs; docs and examples import the names that users are
promised; tests wait for conditions.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent

import yaml

from testbed.repository import EXAMPLES, ROOT

TIME_PASSES = {
    "test_a_request_waits_while_its_rollout_is_replaced": "the request may reach a dead rollout",
    "test_one_of_three_dies_unnoticed_two_stop_writes_and_nothing_is_lost": "nothing is written",
    "test_a_position_truncated_while_it_is_followed_is_reported_after_the_queue": "it fills",
    "test_an_append_in_doubt_is_recognised_when_its_writer_sends_it_again": "the abort is met",
    "test_compacted_topics_are_read_to_their_end_across_the_holes": "segments roll by time",
}
"""Tests that let time pass themselves, and what happens then; none of them fails if it does not."""


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


def test_the_changelog_names_a_change_once() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\* .*?(?=^\* |^#|\Z)", text, re.DOTALL | re.MULTILINE)
    begins = [" ".join(entry.split())[:70] for entry in entries]
    assert sorted({begin for begin in begins if begins.count(begin) > 1}) == []


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


def _sleeps(text: str) -> list[str]:
    """Returns the calls of a sleep, and the tests that let time pass themselves."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr == "sleep":
            found += ["time.sleep"] if getattr(node.value, "id", "") == "time" else []
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += ["time.sleep" for alias in node.names if alias.name == "sleep"]
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            inner = [one for one in ast.walk(node) if isinstance(one, ast.FunctionDef)]
            nested = {id(call) for one in inner if one is not node for call in ast.walk(one)}
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            own = [call for call in calls if id(call) not in nested]
            if any(getattr(call.func, "id", "") == "let_pass" for call in own):
                found.append(node.name)
    return found


def test_tests_wait_for_conditions_and_never_sleep() -> None:
    files = [file for top in ("tests", "testbed") for file in (ROOT / top).rglob("*.py")]
    sleeps = {
        (file.relative_to(ROOT).as_posix(), sleep)
        for file in files
        for sleep in _sleeps(file.read_text(encoding="utf-8"))
    }
    allowed = {("testbed/waiting.py", "time.sleep")}
    assert {one for one in sleeps if one[1] not in TIME_PASSES} == allowed
    assert {sleep for _, sleep in sleeps} == {*TIME_PASSES, "time.sleep"}


def test_a_sleep_of_a_test_is_found() -> None:
    assert _sleeps("import time\ntime.sleep(1)\nfrom time import sleep") == ["time.sleep"] * 2
    assert _sleeps("def test_a():\n    let_pass(1)") == ["test_a"]
    assert not _sleeps("def test_a():\n    def slow():\n        let_pass(1)")
