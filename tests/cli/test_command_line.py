"""The command line: help, examples that parse, exit codes, and no slow import before it is
needed.
"""

import shlex
import subprocess
import sys

import pytest

from rollstream.cli.main import main, parser
from testbed.repository import ROOT

COMMANDS = tuple(parser()._subparsers._group_actions[0].choices)  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        parser().parse_args([command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_in_the_help_parses(command, capsys):
    lines = help_of(command, capsys).splitlines()
    examples = [line.strip() for line in lines if line.startswith("  rollstream ")]
    assert examples
    for example in examples:
        assert parser().parse_args(shlex.split(example)[1:]).command == command


def test_help_imports_nothing_slow():
    code = (
        "import sys; from rollstream.cli.main import parser; parser().format_help(); "
        "print(sorted({'torch', 'pydantic', 'numpy', 'rich', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


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


def test_versions_to_evaluate_must_be_numbers(tmp_path, capsys):
    assert main(["eval", "x.toml", "--versions", "0,ten"]) == 2
    assert "write numbers, e.g. 0,10,60" in capsys.readouterr().err


def test_a_report_of_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_an_unknown_command_exits_2(capsys):
    with pytest.raises(SystemExit) as end:
        main(["fly"])
    assert end.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err
