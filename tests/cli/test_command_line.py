"""The command line: help, examples that parse, exit codes, and no slow import before it is
needed.
"""

import re
import shlex
import subprocess
import sys

import pytest

from rollstream.run.cli.arguments import CommandParser
from rollstream.run.cli.commands import COMMANDS, GROUPS, command_parsers
from rollstream.run.cli.main import main, parse
from testbed.repository import ROOT

PARSERS = [parser for name in COMMANDS for parser in command_parsers(name)]


def imported(code: str, *packages: str) -> str:
    """Which of the packages are imported after `code`, in a process of its own."""
    line = f"import sys; {code}; print(*sorted({{*{packages}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.title)
def test_each_help_has_examples_that_parse(parser: CommandParser) -> None:
    lines = [line.strip() for line in parser.format_help().splitlines()]
    examples = [line for line in lines if line.startswith("rollstream ")]
    assert examples == parser.example_lines()
    assert examples
    for example in examples:
        arguments = parse(shlex.split(example)[1:])
        assert (arguments.command, arguments.action) == (parser.command, parser.action)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"\n  rollstream {command}" in capsys.readouterr().out


def test_the_help_lists_every_command_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == shown
    lines = iter(shown.splitlines())
    for group, commands in GROUPS.items():
        assert any(line.startswith(f"{group}: ") for line in lines)
        for command in commands:
            assert next(lines).split()[0] == command.name


def test_help_imports_nothing_slow():
    slow = ("torch", "pydantic", "numpy", "rich", "transformers", "duckdb", "msgspec")
    assert imported("from rollstream.run.cli.main import main; main([])", *slow) == ""


def test_the_help_of_no_command_imports_a_model_or_an_engine():
    code = "from rollstream.run.cli.commands import *; [command_parsers(name) for name in COMMANDS]"
    assert imported(code, "torch", "transformers", "vllm") == ""


def test_a_mistake_in_the_configuration_exits_2_with_one_line(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rollstream: no configuration file")
    assert error.count("\n") == 1


def test_a_role_refuses_a_wrong_setting_before_it_loads_a_model(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[trainer]\nlrr = 1\n")
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 2
    assert "nearest known: trainer.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "file", "right"),
    [("simulate", "quickstart.toml", "run"), ("run", "cluster-1024.toml", "simulate")],
)
def test_a_configuration_of_another_kind_is_one_line(
    command: str, file: str, right: str, capsys
) -> None:
    path = ROOT / "examples" / file
    assert main([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"use it with rollstream {right} {path}\n")
    assert error.count("\n") == 1


def test_versions_to_evaluate_must_be_numbers(tmp_path, capsys):
    assert main(["eval", "x.toml", "--versions", "0,ten"]) == 2
    assert "write numbers, e.g. 0,10,60" in capsys.readouterr().err


def test_a_report_of_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [("runn", "nearest: run"), ("logs", "nearest: tail"), ("xyzzy", "known: run, check")],
)
def test_an_unknown_command_names_the_nearest(typed: str, answer: str, capsys) -> None:
    assert main([typed]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rollstream: unknown command '{typed}'; {answer}")
    assert error.count("\n") == 1


def test_version_names_release_and_revision(capsys) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"rollstream \d+\.\d+\.\d+ \(.+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "name", "reason"),
    [
        ("rollout", "", "unset variable of the shell"),
        ("train", " ", "unset variable of the shell"),
        ("rollout", "gpu 1", "characters A-Z a-z 0-9 . _ = -, got 'gpu 1'"),
    ],
)
def test_a_name_that_no_process_can_have_is_refused(command, name, reason, capsys):
    with pytest.raises(SystemExit) as refused:
        main([command, "run.toml", "--name", name])
    assert refused.value.code == 2
    assert "argument --name: must" in (error := capsys.readouterr().err)
    assert reason in error
