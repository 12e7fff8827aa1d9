"""Commands that are printed for the user: whatever is in their words, bash reads the same words."""

import ast
import re
import subprocess

import pytest

from rollstream.printable import printable, shell_command, shell_words
from testbed.repository import ROOT

FOLDERS = ("rollstream", "streams", "storage", "producers", "consumers", "simulator")
COMMAND = re.compile(r"(?<!\w)rollstream [a-z]+(-[a-z]+)* [^`\n]*\{\}")


def f_strings(node: ast.AST) -> str:
    """The text of an f-string, with {} for each of its expressions."""
    assert isinstance(node, ast.JoinedStr)
    parts = node.values
    return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)


def test_every_command_with_words_of_others_is_written_by_one_function() -> None:
    unquoted = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr) and COMMAND.search(f_strings(node))
    ]
    assert unquoted == []


@pytest.mark.parametrize(
    "word",
    ["a b", "$(touch x); c", "s3://bucket/k1?endpoint=x&region=us-east-1", "", "it's", "a\nb\t\\'c",
     "\x1b[2J'", "--x", "é\u202ea"],
)  # fmt: skip
def test_bash_reads_the_printed_words(word: str) -> None:
    line = shell_words("--set", word)
    assert printable(line) == line
    assert len(line.splitlines()) == 1
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True,
        env={"LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert said.stdout.decode() == f"--set\0{word}\0"


def test_plain_words_stay_plain() -> None:
    assert shell_command("run", "runs/one", "--set", "trainer.lr=1e-4") == (
        "rollstream run runs/one --set trainer.lr=1e-4"
    )
