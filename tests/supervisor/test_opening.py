"""Refusals at opening: final ones, ones that may pass at the next start, and other errors; and the
supervisor's reaction to each.
"""

import sys
import threading
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError, EngineRefused, EngineUnavailable
from rollstream.run.checks.machine import unwritable_reason
from rollstream.run.roles.context import classify_engine_errors
from rollstream.run.supervisor.process import (
    EXIT_REFUSED,
    EXIT_UNSERVED,
    ChildProcess,
    ProcessSpec,
    RestartPolicy,
    is_final_exit,
    last_lines,
)
from rollstream.run.supervisor.supervisor import Supervisor, SupervisorLimits
from testbed.waiting import wait_for

CAUSE = RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("is_server", "raised", "cause", "wanted"),
    [
        (False, EngineRefused("a window"), None, ConfigurationError),
        (False, EngineRefused("no memory"), CAUSE, EngineUnavailable),
        (False, ConfigurationError("a setting"), None, ConfigurationError),
        (True, EngineRefused("no answer"), None, EngineRefused),
        (True, EngineRefused("it ended"), CAUSE, EngineRefused),
        (True, ConfigurationError("no routes"), None, EngineUnavailable),
        (False, RuntimeError("a bug"), None, RuntimeError),
    ],
)
def test_a_refusal_at_opening_states_whether_it_may_pass(is_server, raised, cause, wanted):
    with pytest.raises(wanted) as error, classify_engine_errors("torch", is_server=is_server):
        raise raised from cause
    assert type(error.value) is wanted
    assert str(raised) in str(error.value)


def test_an_error_states_what_to_do():
    wanted = "cannot serve this run's model: a window; choose another model"
    with pytest.raises(ConfigurationError, match=wanted), classify_engine_errors("torch"):
        raise EngineRefused("a window")


def test_a_later_version_that_is_refused_may_be_followed_by_a_better_one():
    with pytest.raises(EngineUnavailable), classify_engine_errors("torch", is_first=False):
        raise EngineRefused("weights: not finite")


def test_only_refusals_are_for_good():
    assert is_final_exit(EXIT_REFUSED, None)
    assert is_final_exit(EXIT_UNSERVED, EXIT_UNSERVED)
    assert not is_final_exit(EXIT_UNSERVED, None)
    assert not is_final_exit(EXIT_UNSERVED, -9)
    assert not any(
        is_final_exit(code, before) for code in (-9, 0, 1, 143) for before in (code, 2, 3)
    )


def exits(folder: Path, *codes: int) -> ProcessSpec:
    """A role that ends with these codes, one a start, with a message; then with 0."""
    code = f"""
import pathlib, sys
mark = pathlib.Path({str(folder)!r}, "starts")
number = len(mark.read_text()) if mark.exists() else 0
mark.write_text("x" * (number + 1))
code = ({codes!r} + (0,) * 99)[number]
print("loading", flush=True)
print(f"rollstream: start {{number}} ended with {{code}}", file=sys.stderr)
sys.exit(code)
"""
    return ProcessSpec("rollout-0", [sys.executable, "-c", code], ends="run")


def outcome(folder: Path, seat: ProcessSpec):
    policy = RestartPolicy(first_s=0.01, longest_s=0.02)
    supervisor = Supervisor(
        [seat], folder / "logs", policy=policy, limits=SupervisorLimits(tick_s=0.01)
    )
    return supervisor.run(threading.Event(), threading.Event(), lambda states: None)


def test_a_role_refused_twice_in_a_row_ends_the_run_with_its_message(tmp_path):
    ended = outcome(tmp_path, exits(tmp_path, 1, EXIT_UNSERVED, EXIT_UNSERVED))
    assert ended.kind == "failed"
    assert ended.message.startswith("rollout-0 refused to start: start 2 ended with 3\n")
    assert "loading" not in ended.message


def test_a_role_refused_once_or_between_crashes_continues(tmp_path):
    seat = exits(tmp_path, EXIT_UNSERVED, 1, EXIT_UNSERVED, 139, EXIT_UNSERVED)
    assert outcome(tmp_path, seat).kind == "complete"


def test_the_message_is_that_of_the_last_start(tmp_path):
    log = tmp_path / "role.log"
    log.write_text("rollstream: an earlier start\n")
    child = ChildProcess(
        ProcessSpec("role", [sys.executable, "-c", "print('nothing more')"]), log, {}, None
    )
    wait_for(lambda: child.reap() is not None)
    assert child.error_message() == ""


def test_a_log_is_rotated_and_its_newest_lines_are_read_across(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    script = (
        "import sys\n"
        "for n in range(100): print('line', n, flush=True)\n"
        "sys.stdin.read()\n"
        "print('rollstream: the end', flush=True)"
    )
    child = ChildProcess(ProcessSpec("role", [sys.executable, "-c", script]), log, {}, None)
    wait_for(lambda: child.reap() is not None)
    child.rotate_log(bytes_max=1 << 20)
    assert not log.with_suffix(".log.1").exists()
    child.rotate_log(bytes_max=100)
    assert log.stat().st_size == 0
    assert last_lines(log, 2) == ["line 99", "rollstream: the end"]
    with log.open("a") as more:
        more.write("later\n")
    assert last_lines(log, 2) == ["rollstream: the end", "later"]
    assert child.error_message() == ""


def test_the_reason_names_a_folder_that_exists_and_may_not_be_written(tmp_path):
    (tmp_path / "file").touch()
    denied = unwritable_reason(tmp_path, tmp_path)
    assert denied.startswith(f"the run's folder {tmp_path} may not be written by this user: Permis")
    assert "cannot be made in" in unwritable_reason(tmp_path / "new", tmp_path)
    assert "Not a directory" in unwritable_reason(tmp_path / "file" / "new", tmp_path / "file")
