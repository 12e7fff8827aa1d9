"""A fork as its user runs it: made from a living run, killed with -9 in part and as a whole, and
resumed; then both runs are audited and counted.
"""

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.streams.records import Admitted, GroupClosed, Prompt, StepDone, Take
from testbed.recount import places_of, recount
from testbed.run_process import (
    GROUPS,
    assert_the_log_adds_up,
    kill_all,
    random_model,
    read,
    role,
    role_restarted,
    running,
    started,
    steps_done,
)
from testbed.waiting import WAIT_S, wait_for

AT, END, STEPS = 4, 18, 40
LINE = [sys.executable, "-m", "rollstream"]
UNEVEN = "task.name=tests.support.uneven_task:Uneven"
PARENT = [UNEVEN, f"trainer.steps={STEPS}", "checkpoints.keep=20"]


def command_json(*words: str) -> dict:
    done = subprocess.run([*LINE, *words, "--json"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@contextmanager
def gone_on(folder: Path) -> Generator[subprocess.Popen[bytes]]:
    """`rollstream run FOLDER`."""
    with running([*LINE, "run", str(folder)], folder.parent / "fork.txt") as process:
        yield process


@pytest.mark.long
def test_a_fork_of_a_living_run_continues_under_kills_and_both_are_clean(tmp_path: Path) -> None:
    folder, fork = tmp_path / "run", tmp_path / "fork"
    with started(folder, random_model(tmp_path / "model"), PARENT) as process:
        wait_for(lambda: steps_done(folder) > AT, process)
        made = command_json(
            "fork", str(folder), "--at", str(AT), "--out", str(fork), "--set",
            f"trainer.steps={END}", "--set", "dispatch.lease_s=3", "--set", "trainer.lease_s=3",
        )  # fmt: skip
        assert made["step"] == AT
        assert process.wait(WAIT_S) == 0
    assert_the_log_adds_up(folder, STEPS)
    before = command_json("audit", str(folder), "--whole")
    with gone_on(fork) as process:
        wait_for(lambda: steps_done(fork) > AT + 2, process)
        victim = role(process, "trainer")
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: role_restarted(process, "trainer", victim.pid), process)
        wait_for(lambda: steps_done(fork) > AT + 5, process)
        kill_all(process)
    with gone_on(fork) as process:
        assert process.wait(WAIT_S) == 0
    began = re.findall(r"resumes after step (\d+)", (fork / "logs" / "trainer.log").read_text())
    assert int(began[0]) == AT
    assert min(map(int, began)) == AT
    assert command_json("audit", str(folder), "--whole") == before
    assert_fork_is_whole(folder, fork)


def assert_fork_is_whole(folder: Path, fork: Path) -> None:
    assert command_json("audit", str(fork))["violations"] == 0
    counted = recount(places_of(str(fork)))
    assert counted["steps"] == END - AT
    assert (counted["groups"]["ended_twice"], counted["trajectories"]["trained_twice"]) == (0, 0)
    hashes: dict[int, set[str]] = {}
    for done in read(fork, "ledger", StepDone):
        hashes.setdefault(done.step, set()).add(done.state_hash)
    assert set(hashes) == set(range(AT + 1, END + 1))
    assert all(len(found) == 1 for found in hashes.values()), "a repeated step differs"
    assert len({one for found in hashes.values() for one in found}) == END - AT
    trained = Counter(g.group for take in read(fork, "ledger", Take) for g in take.groups)
    assert max(trained.values()) == 1
    assert len(trained) == (END - AT) * GROUPS
    assert_prompts_continue(folder, fork, set(trained))


def assert_prompts_continue(folder: Path, fork: Path, trained: set[int]) -> None:
    """Neither repeated nor skipped relative to the step of the fork."""
    done = {g.group for t in read(folder, "ledger", Take) if t.step <= AT for g in t.groups}
    done |= {c.group for c in read(folder, "ledger", GroupClosed) if c.step <= AT}
    admitted = [record.group for record in read(fork, "admissions", Admitted)]
    assert admitted == sorted(set(admitted))
    assert not done & set(admitted)
    assert done | set(admitted) == set(range(max(admitted) + 1))
    assert trained <= set(admitted)
    assert {record.group for record in read(fork, "prompts", Prompt)}.isdisjoint(done)
