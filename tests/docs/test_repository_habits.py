"""Hooks and workflows run what the Makefile runs."""

import re

import yaml

from testbed.repository import ROOT


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
