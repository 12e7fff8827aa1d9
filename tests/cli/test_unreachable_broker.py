"""A broker that cannot be reached is one sentence, from every command, without the client's log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.repository import ROOT
from testbed.waiting import WAIT_S

URL = "kafka://127.0.0.1:9/x"  # nothing listens on the discard port


@pytest.mark.parametrize(
    "words",
    [
        ["run", "runs/one"], ["top", "--once"], ["report"], ["diff", "one", "one"],
        ["query", "FROM steps"], ["tail", "ledger"], ["inspect", "--last"],
        ["replay", "--to", "sqlite:copy"], ["audit"],
        ["fork", "runs/one", "--at", "1", "--out", "two"],
        ["backup", "runs/one", "backup"], ["rm", "runs/one", "--yes"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_command_states_it_in_one_line(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"run": "x", "bus": URL}))
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == (2 if words[0] == "audit" else 1)
    assert "kafka.net" not in done.stderr
    last = [line for line in done.stderr.splitlines() if "using the newest run" not in line]
    assert len(last) == 1, done.stderr
    assert f"no broker of {URL} can be reached (127.0.0.1:9: Connection refused)" in last[0]
