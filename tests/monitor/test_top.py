"""`rollstream top` attaches to any run, only reads, is bounded, and leaves the terminal clean."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Dead
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import publish
from testbed.repository import ROOT
from testbed.waiting import WAIT_S
from tests.support.synthetic_run import GROUPS, publish_run


def one(path, capsys) -> dict:
    assert main(["top", str(path), "--once", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def ends(folder: RunFolder) -> dict[str, dict[int, int]]:
    bus = open_bus(f"sqlite:{folder.path / 'bus'}")
    found = {topic.name: bus.end(topic.name) for topic in catalogue()}
    bus.close()
    return found


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [".", "config.json"])
def test_it_attaches_to_a_folder_or_its_configuration(run_folder, capsys, path):
    found = one(run_folder.path / path, capsys)
    assert (found["step"], found["phase"]) == (60, "last evaluation")
    assert found["outcomes"]["groups"] == {"trained": 60 * GROUPS, "dead": 1}
    assert [line["name"] for line in found["rollouts"]] == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("columns", [80, 160])
def test_once_prints_one_frame_into_a_pipe(run_folder, columns):
    command = [sys.executable, "-m", "rollstream", "top", str(run_folder.path), "--once"]
    environment = {**os.environ, "COLUMNS": str(columns)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert {len(line) for line in done.stdout.splitlines()} == {columns}
    assert done.stdout.count("step 60 of 60") == 1


def test_nothing_is_written_even_where_bytes_are_no_record(tmp_path, capsys):
    folder = publish_run(tmp_path / "run", steps=3)
    bus = open_bus(f"sqlite:{folder.path / 'bus'}")
    bus.append("trajectories", [AppendEntry(b"1", b"rubbish")])
    bus.append("ledger", [AppendEntry(b"run", b"rubbish")])
    bus.close()
    before = ends(folder)
    assert one(folder.path, capsys)["step"] == 3
    assert ends(folder) == before


def test_a_run_that_was_only_prepared_is_shown_and_gets_no_log(tmp_path, capsys):
    write_configuration(RunFolder(tmp_path), Configuration(folder=str(tmp_path)))
    assert one(tmp_path, capsys)["phase"] == "starting"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_finished_run_is_reported_once(tmp_path, capsys):
    folder = publish_run(tmp_path / "run", steps=3)
    with (folder.metrics / "supervisor.jsonl").open("a") as events:
        events.write('{"time_s": 1.0, "event": "complete", "note": ""}\n')
    assert main(["top", str(folder.path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["phase"] == "finished, evaluated to v0"
    assert main(["top", str(folder.path)]) == 0
    assert capsys.readouterr().out.count("step 3/60 finished") == 1


def test_dead_letters_and_deaths_are_shown(tmp_path, capsys):
    folder = publish_run(tmp_path / "run", steps=3)
    bus = open_bus(f"sqlite:{folder.path / 'bus'}")
    dead = Dead("status", 0, 7, "starts with b'no'", np.zeros(3, np.uint8))
    publish(bus, "dead", "x", dead)
    bus.close()
    found = one(folder.path, capsys)
    assert found["dead_letters"] == {"status": {"count": 1, "reason": "starts with b'no'"}}
    assert [(death["role"], death["code"]) for death in found["deaths"]] == [("rollout-1", -9)]
    assert "dead_letters" in [concern["kind"] for concern in found["concerns"]]


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none", tmp_path / "config.json"):
        assert main(["top", str(path), "--once"]) == 2
        assert "holds no run" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--every", "0"]) == 2
    assert "at least 0.1" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--every", "nan"]) == 2


def test_a_damaged_log_is_an_error_once_and_a_line_in_a_frame(tmp_path, capsys):
    folder = publish_run(tmp_path / "run", steps=3)
    for path in (folder.path / "bus").glob("ledger.db*"):
        path.write_bytes(b"not a database" * 2000)
    assert main(["top", str(folder.path), "--once"]) == 1
    error = capsys.readouterr().err
    assert "the run cannot be read" in error
    assert "ledger.db" in error


# ---- on a terminal -------------------------------------------------------------------------------


class Terminal:
    """`top` on a pseudo-terminal of 80 × 40."""

    def __init__(self, folder: Path) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 80))
        self.before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "rollstream", "top", str(folder), "--every", "0.2"]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        self.theirs, self.seen = theirs, b""

    def read_until(self, words: bytes) -> None:
        deadline = time.monotonic() + WAIT_S
        while words not in self.seen and time.monotonic() < deadline:
            self._read()
        assert words in self.seen, self.seen[-2000:]

    def end(self) -> int:
        while self.process.poll() is None:
            self._read()
        self._read()
        return self.process.returncode

    def _read(self) -> None:
        if select.select([self.ours], [], [], 0.1)[0]:
            self.seen += os.read(self.ours, 1 << 16)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize(
    ("key", "number", "code"),
    [(b"q", None, 0), (None, signal.SIGINT, 0), (None, signal.SIGTERM, 143)],
)
def test_it_leaves_the_terminal_as_it_found_it(run_folder, key, number, code):
    terminal = Terminal(run_folder.path)
    try:
        terminal.read_until(b"step ")
        assert termios.tcgetattr(terminal.theirs) != terminal.before
        if key:
            os.write(terminal.ours, b"x")  # any other key does nothing
            os.write(terminal.ours, key)
        else:
            os.kill(terminal.process.pid, number)
        assert terminal.end() == code
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert terminal.seen.count(b"\x1b[?1049h") == terminal.seen.count(b"\x1b[?1049l") == 1
        assert terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l")
        assert b"Traceback" not in terminal.seen
    finally:
        terminal.close()
