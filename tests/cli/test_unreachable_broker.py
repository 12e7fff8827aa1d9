"""A broker that cannot be reached is one sentence, from every command, without the client's log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.errors import BusError
from rollstream.run.cli.main import main
from rollstream.streams.connect import check_reachable
from testbed.repository import ROOT
from testbed.waiting import WAIT_S

URL = "kafka://127.0.0.1:9/x"  # nothing listens on the discard port
COMMANDS = [
    ["run", "runs/one"], ["top", "--once"], ["report"], ["diff", "one", "one"],
    ["query", "FROM steps"], ["tail", "ledger"], ["inspect", "--last"],
    ["replay", "--to", "sqlite:copy"], ["audit"],
    ["fork", "runs/one", "--at", "1", "--out", "two"],
    ["backup", "runs/one", "backup"], ["rm", "runs/one", "--yes"],
]  # fmt: skip
PROCESSES = ("run", "query", "audit")
"""Those tried as processes, too, whose standard error nothing else has configured."""


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"run": "x", "bus": URL}))
    return tmp_path


def assert_one_line(words: list[str], code: int, errors: str) -> None:
    assert code == (2 if words[0] == "audit" else 1)
    assert "kafka.net" not in errors
    last = [line for line in errors.splitlines() if "using the newest run" not in line]
    assert len(last) == 1, errors
    assert f"no broker of {URL} can be reached (127.0.0.1:9: Connection refused" in last[0]


@pytest.mark.parametrize("host", [".example.com", "b1..example.com"])
def test_a_name_that_no_host_can_have_is_a_broker_that_cannot_be_reached(host: str) -> None:
    with pytest.raises(BusError, match="is no host's name; is a variable of the shell unset"):
        check_reachable(f"kafka://{host}:9092/x", 1.0)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_command_states_it_in_one_line(
    words: list[str],
    user_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(user_folder)
    code = main(words)
    assert_one_line(words, code, capfd.readouterr().err)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] in PROCESSES])
def test_a_process_of_it_does_so(words: list[str], user_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", *words],
        cwd=user_folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert_one_line(words, done.returncode, done.stderr)
