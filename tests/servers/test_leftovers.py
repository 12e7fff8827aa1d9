"""Nothing that tests start outlives them: neither a kill nor a test that forgets leaves processes
or temporary files.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollstream.run.signals import listen_for_signals
from testbed.repository import ROOT
from testbed.servers import free_ports
from testbed.waiting import WAIT_S, wait_for
from tests.servers.everything_started import MEMORY_NOTE, NOTE

FILE = "tests/servers/everything_started.py"


def line(test: str, *more: str) -> list[str]:
    own = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *more]
    return [sys.executable, "-m", "pytest", f"{FILE}::{test}", *own]


def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "temporary").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTEST_DEBUG_TEMPROOT": str(tmp_path),
        NOTE: str(tmp_path / "note"),
        MEMORY_NOTE: str(tmp_path / "memory_note"),
    }


def assert_nothing_is_left(test: str, tmp_path: Path, number: int, *more: str) -> None:
    note, temporary = tmp_path / "note", tmp_path / "temporary"
    given, output = environment(tmp_path), tmp_path / "pytest.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(line(test, *more), cwd=ROOT, env=given, stdout=file, stderr=file)
    try:
        wait_for(note.exists, process, output.read_text)
        pids = [int(word) for word in note.read_text().split()]
        started = [psutil.Process(pid) for pid in pids]
        assert len(started) > 2
        assert list(temporary.glob("*/*"))
        os.kill(pids[0] if more else process.pid, number)
        process.wait(WAIT_S)
        psutil.wait_procs(started, timeout=WAIT_S)
        assert not [one for one in started if one.is_running()]
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not list(temporary.iterdir()))
    if (memory := tmp_path / "memory_note").exists():
        wait_for(lambda: not Path(memory.read_text()).parent.exists())


def test_programs_and_files_of_tests_end_with_a_killed_pytest(tmp_path):
    assert_nothing_is_left("test_programs", tmp_path, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_every_server_of_tests_ends_with_pytest(tmp_path, number):
    assert_nothing_is_left("test_servers", tmp_path, number)


@pytest.mark.slow
def test_what_a_killed_worker_started_ends(tmp_path):
    assert_nothing_is_left("test_programs", tmp_path, signal.SIGKILL, "-n", "1")


def test_a_process_that_a_test_leaves_running_fails_the_run(tmp_path):
    done = subprocess.run(
        line("test_that_leaves_one"), cwd=ROOT, env=environment(tmp_path), capture_output=True,
        text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "everything_started.py leaves these running:" in done.stdout
    assert "signal.pause()" in done.stdout


def test_a_command_in_this_process_listens_for_signals():
    listen_for_signals()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_signals_end_the_tests_after_a_command_that_listened():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN)


def test_a_command_in_this_process_does_not_lower_the_priority_of_the_tests():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.nice(1)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_ports_are_not_given_to_tests_of_another_clone(tmp_path):
    mine = free_ports(200)
    code = "from testbed.servers import free_ports; print(*(free_ports(1)[0] for _ in range(200)))"
    given = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    theirs = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(theirs) == 200
    assert not set(mine) & set(map(int, theirs))
