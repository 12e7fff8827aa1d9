"""Every command printed in README or docs is checked: it parses, its settings and files exist, its
SQL runs. README's own commands run on a real run in `tests/cli/test_command_examples.py`, and those
of `--help` (reference/commands.md) there and beside it.
"""

import re
from collections.abc import Iterator

import pytest

from benchmarks.catalogue import BENCHMARKS
from rollstream.api import open_run
from rollstream.look.query.trajectory import Run
from rollstream.run.cli.commands import COMMANDS
from rollstream.run.cli.main import parse
from rollstream.run.config.config import load
from testbed.repository import EXAMPLES, ROOT
from tests.support.printed_commands import (
    PrintedCommand,
    pages,
    printed_commands,
    without_optional_parts,
)

NOT_RUN = {
    ("git", "clone"): "needs the network",
    ("pip", "install"): "needs the network; the extras' names are compared with pyproject.toml",
    ("docker", "compose"): "needs a Docker daemon: tests/stack has its own",
    ("kill", "-9"): "of a container's first process: tests/stack kills those of its own",
    ("torchrun", "--nnodes"): "needs several machines; tests/trainer starts ranks in one",
    ("python", "-m", "studies.gpu_check"): "tests/benchmarks/test_gpu_check.py runs it",
    ("python", "-m", "studies.evidence_runs"): "minutes a run",
    ("python", "-m", "testbed.oncall.game_day"): "waits for an operator",
    (
        "python",
        "-m",
        "studies.evidence.page",
    ): "tests/benchmarks compares the page with the rows",
    ("pkill", "-9"): "ends processes by name; tests/chaos kills roles of its own runs",
    ("export", "KAFKA_USER=rollstream"): "not ours",
    ("tensorboard", "--logdir"): "not ours; tests/metrics reads the files that it shows",
    ("pip", "install", "pre-commit"): "needs the network",
    ("pre-commit", "install"): "changes the checkout's hooks",
}
"""Commands that no test runs, by their first words, each with its reason."""

SYNOPSIS = "…"
READERS_OWN = ("model.path=",)
"""Settings whose value is a folder that only the reader has."""
INLINE = re.compile(r"`(?:\.venv/bin/)?rollstream ([a-z][a-z-]*)\b")


def _reason(command: PrintedCommand) -> str:
    found = [why for words, why in NOT_RUN.items() if command.words[: len(words)] == words]
    return found[0] if found else ""


def _of(*start: str) -> list[PrintedCommand]:
    chosen = (one for one in printed_commands() if one.words[: len(start)] == start)
    return [one for one in dict.fromkeys(chosen) if not _reason(one)]


@pytest.mark.parametrize("command", _of("rollstream"), ids=str)
def test_a_command_parses_and_its_settings_and_files_exist(command: PrintedCommand) -> None:
    words = without_optional_parts(command.words[1:])
    try:
        arguments = parse(words)
    except SystemExit:
        pytest.fail(f"{command} does not parse")
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists(), word
    given: list[str] = getattr(arguments, "overrides", [])
    overrides = [one for one in given if not one.startswith(READERS_OWN)]
    if arguments.command != "simulate":
        load(EXAMPLES / "quickstart.toml", overrides, dict(command.variables))


@pytest.fixture(scope="module")
def archive() -> Iterator[Run]:
    with open_run(str(EXAMPLES / "archive")) as run:
        yield run


@pytest.mark.parametrize(
    "sql",
    [
        sql
        for one in _of("rollstream", "query")
        if (sql := parse(without_optional_parts(one.words[1:])).sql) and SYNOPSIS not in sql
    ],
)
def test_a_query_runs_on_the_recorded_archive(sql: str, archive: Run) -> None:
    archive.sql(sql)


@pytest.mark.parametrize("command", _of("make"), ids=str)
def test_a_target_exists(command: PrintedCommand) -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in command.words[1:]:
        assert "=" in word or word in targets.split(), command


@pytest.mark.parametrize("command", _of("python", "-m", "benchmarks"), ids=str)
def test_a_benchmark_exists(command: PrintedCommand) -> None:
    names = [word for word in command.words[3:] if not word.startswith("--")]
    assert set(names) <= set(BENCHMARKS), command


def test_each_command_is_run_or_has_a_reason() -> None:
    checked = {
        *_of("rollstream"), *_of("make"), *_of("python", "-m", "benchmarks"),
        *_of("python", "-m", "testbed.reference_pages"), *_of("python", "-m", "pytest"),
    }  # fmt: skip
    left = [str(one) for one in printed_commands() if one not in checked and not _reason(one)]
    assert left == []


def test_each_reason_is_needed() -> None:
    printed = {one.words[:size] for one in printed_commands() for size in (2, 3)}
    assert [words for words in NOT_RUN if words not in printed] == []


def test_each_extra_that_is_installed_exists() -> None:
    named = {
        extra
        for one in printed_commands()
        if one.words[:2] == ("pip", "install")
        for extra in re.findall(r"rollstream\[(\w+)\]", " ".join(one.words))
    }
    project = (ROOT / "pyproject.toml").read_text()
    assert [
        extra for extra in sorted(named) if not re.search(rf"^{extra} = \[", project, re.M)
    ] == []


def test_a_pytest_command_names_tests_that_exist() -> None:
    for command in _of("python", "-m", "pytest"):
        for word in command.words[3:]:
            assert not word.startswith("tests/") or (ROOT / word).exists(), command


def test_each_command_that_a_sentence_names_exists() -> None:
    unknown = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        for name in INLINE.findall(page.read_text(encoding="utf-8"))
        if name not in COMMANDS
    ]
    assert unknown == []
