"""The supervisor over tiny scripts: restarts, bounds, clean stops, and no orphans."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from rollstream.run.supervisor.process import ProcessSpec, RestartPolicy, last_lines
from rollstream.run.supervisor.supervisor import RunLock, Supervisor, SupervisorLimits
from testbed.repository import ROOT
from testbed.waiting import WAIT_S, is_alive, wait_for

FAST = RestartPolicy(first_s=0.01, longest_s=0.02)

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
{SLEEP}
"""
NOTE = """
import json, os
names = ("ROLLSTREAM_NONCE", "ROLLSTREAM_HANDED_NONCE")
print(json.dumps([os.environ.get(name) for name in names]), flush=True)
"""


class Run:
    """Process specs run by a supervisor in a thread of the test."""

    def __init__(
        self, folder: Path, *seats: ProcessSpec, lock: RunLock | None = None, **limits: float
    ):
        self.events: list[dict[str, object]] = []
        self.folder, self.stop, self.hurry = folder, threading.Event(), threading.Event()
        bounds = SupervisorLimits(tick_s=0.01, **limits)
        record = self.events.append
        self.supervisor = Supervisor(seats, folder, lock, record, FAST, bounds)  # pyright: ignore

    def outcome(self, until=lambda: False):
        """Runs to the end, or until `until` and then stops."""

        def show(states):
            if until():
                self.stop.set()

        return self.supervisor.run(self.stop, self.hurry, show)

    def lines(self, name: str) -> list[str]:
        return last_lines(self.folder / f"{name}.log")

    def of(self, event: str) -> list[dict[str, object]]:
        return [one for one in self.events if one["event"] == event]


def seat(name: str, code: str, **settings) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code], **settings)


def test_the_run_is_complete_when_the_trainer_is(tmp_path):
    run = Run(tmp_path, seat("trainer", "pass", ends="run"), seat("rollout-0", SLEEP))
    assert run.outcome().kind == "complete"
    assert not any(is_alive(int(one["pid"])) for one in run.of("start"))  # pyright: ignore


def test_evaluation_may_finish_its_last_version(tmp_path):
    code = f"import time, pathlib; time.sleep(.3); pathlib.Path({str(tmp_path)!r}, 'done').touch()"
    run = Run(tmp_path, seat("trainer", "pass", ends="run"), seat("eval", code, ends="itself"))
    assert run.outcome().kind == "complete"
    assert (tmp_path / "done").exists()


def test_evaluation_that_never_finishes_is_not_waited_for_for_ever(tmp_path):
    trainer, evaluation = seat("trainer", "pass", ends="run"), seat("eval", SLEEP, ends="itself")
    assert Run(tmp_path, trainer, evaluation, finish_s=0.05).outcome().kind == "complete"


@pytest.mark.parametrize(("has_work", "kind"), [(True, "stopped"), (False, "complete")])
def test_a_stop_during_the_last_evaluation_completes_nothing(tmp_path, has_work, kind):
    """The next start makes it, as it would not if the run were noted as complete."""
    trainer = seat("trainer", "pass", ends="run")
    evaluation = seat("eval", SLEEP if has_work else "pass", ends="itself")
    run = Run(tmp_path, trainer, evaluation, seat("rollout-0", SLEEP))

    def has_trained():
        return run.supervisor.states()[0].state == "done"

    assert run.outcome(until=has_trained if has_work else lambda: False).kind == kind


def test_a_role_that_died_is_restarted_and_reported(tmp_path):
    code = f"""
        import os, pathlib, signal
        mark = pathlib.Path({str(tmp_path)!r}, 'died')
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    run = Run(tmp_path, seat("trainer", textwrap.dedent(code), ends="run"))
    notes: list[str] = []
    supervisor = run.supervisor

    def show(states):
        notes.extend(state.note for state in states if state.note)

    assert supervisor.run(run.stop, run.hurry, show).kind == "complete"
    assert "died (SIGKILL), restart 1" in notes
    assert [one["code"] for one in run.of("death")] == [-9]
    assert supervisor.states()[0].restarts == 1


def test_the_live_note_says_why_a_role_died(tmp_path):
    code = "import sys; sys.exit('rollstream: object v6 has hash a,\\nannounced b')"
    run = Run(tmp_path, seat("rollout-0", code))
    notes: list[str] = []

    def show(states):
        notes.extend(state.note for state in states if state.note)

    run.supervisor.run(run.stop, run.hurry, show)
    assert "died (exit code 1: object v6 has hash a, announced b), restart 1" in notes


def test_exit_0_of_a_role_whose_work_never_ends_is_a_death(tmp_path):
    run = Run(tmp_path, seat("dispatch", "pass"))
    assert run.outcome(until=lambda: len(run.of("death")) > 1).kind == "stopped"
    assert run.of("death")[0]["code"] == 0


def test_a_role_that_dies_too_often_ends_the_run_with_its_last_output(tmp_path):
    run = Run(tmp_path, seat("dispatch", "raise SystemExit('out of paper')"), seat("other", SLEEP))
    outcome = run.outcome()
    assert outcome.kind == "failed"
    assert "dispatch died 6 times within 60 s, last with exit code 1" in outcome.message
    assert "| out of paper" in outcome.message
    assert len(run.of("start")) == 7


def test_a_role_that_refuses_its_configuration_is_not_tried_again(tmp_path):
    run = Run(tmp_path, seat("trainer", "raise SystemExit(2)", ends="run"))
    outcome = run.outcome()
    assert outcome.kind == "failed"
    assert "trainer refused to start" in outcome.message
    assert len(run.of("start")) == 1


def test_a_role_that_ignores_its_signal_is_killed(tmp_path):
    run = Run(tmp_path, seat("rollout-0", STUBBORN), stop_s=0.05)
    assert run.outcome(until=lambda: run.lines("rollout-0")).kind == "stopped"
    assert [one["role"] for one in run.of("killed")] == ["rollout-0"]


def test_the_second_signal_kills_at_once(tmp_path):
    run = Run(tmp_path, seat("rollout-0", STUBBORN), stop_s=WAIT_S * 100)
    run.hurry.set()
    run.outcome(until=lambda: run.lines("rollout-0"))
    assert len(run.of("killed")) == 1


def test_the_nonce_of_a_reaped_holder_is_handed_to_the_next(tmp_path):
    code = NOTE + "raise SystemExit(1)"
    run = Run(tmp_path, seat("dispatch", code, single_holder=True))
    run.outcome()
    nonces = [json.loads(line) for line in run.lines("dispatch")]
    own, handed = [one[0] for one in nonces], [one[1] for one in nonces]
    assert handed == [None, *own[:-1]]
    assert len(set(own)) == len(own)


def test_a_role_that_many_hold_is_handed_nothing(tmp_path):
    run = Run(tmp_path, seat("rollout-0", NOTE + "raise SystemExit(1)"))
    run.outcome()
    assert {json.loads(line)[1] for line in run.lines("rollout-0")} == {None}


def test_the_next_supervisor_hands_on_the_nonces_of_the_one_before(tmp_path):
    for _ in range(2):
        lock = RunLock(tmp_path)
        holder = seat("trainer", NOTE, ends="run", single_holder=True)
        Run(tmp_path, holder, lock=lock).outcome()
        lock.close()
    first, second = (json.loads(line) for line in last_lines(tmp_path / "trainer.log"))
    assert second[1] == first[0]


SUPERVISOR = """
import sys, threading
from pathlib import Path
from rollstream.run.supervisor.process import ProcessSpec
from rollstream.run.signals import listen_for_signals
from rollstream.run.supervisor.supervisor import Supervisor
role = ("from rollstream.run.supervisor.process import end_with_parent; end_with_parent();"
        "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
seats = [ProcessSpec(name, [sys.executable, "-c", role]) for name in ("a", "b")]
signals = listen_for_signals()
outcome = Supervisor(seats, Path(sys.argv[1])).run(signals.stop, signals.hurry, lambda states: None)
print(outcome.kind)
"""


@pytest.fixture
def supervised(tmp_path):
    """A supervisor process and the process ids of its two roles."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    logs = [tmp_path / f"{name}.log" for name in ("a", "b")]
    wait_for(lambda: all(last_lines(log) for log in logs))
    yield process, [int(last_lines(log)[0]) for log in logs]
    process.kill()
    process.communicate()


def test_ctrl_c_stops_all_roles(supervised):
    process, roles = supervised
    assert all(is_alive(pid) for pid in roles)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert output.strip() == "stopped"
    assert process.returncode == 0
    assert not any(is_alive(pid) for pid in roles)


def test_roles_end_when_their_supervisor_is_killed(supervised):
    process, roles = supervised
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in roles))
    assert process.wait() == -signal.SIGKILL


def test_a_role_whose_parent_died_before_it_could_ask_ends_itself():
    code = (
        "from rollstream.run.supervisor.process import end_with_parent; "
        "end_with_parent(); print('survived')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLSTREAM_PARENT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


MAKES_ITS_FOLDER = f"""
import pathlib, signal, sys

def write(*_):
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)

signal.signal(signal.SIGTERM, write)
print("up", flush=True)
{SLEEP}
"""


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_run_whose_folder_is_gone_ends_at_once_and_makes_nothing(tmp_path, capfd, is_deleted):
    """What an orderly end writes would be in a new folder under the old name."""
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder)
    command = [sys.executable, "-c", MAKES_ITS_FOLDER, str(folder)]
    run = Run(folder, ProcessSpec("role", command), lock=lock)

    def move_once_up() -> bool:
        if folder.exists() and run.lines("role") == ["up"]:
            folder.rename(tmp_path / "moved")
            if is_deleted:
                shutil.rmtree(tmp_path / "moved")
        return False

    outcome = run.outcome(move_once_up)
    lock.close()
    assert outcome.kind == "failed"
    assert outcome.message.startswith(f"the run's folder {folder} is gone (moved or deleted?)")
    assert not folder.exists()
    assert capfd.readouterr().err == ""
