"""A fork as its user runs it: made from a living run, killed with -9 in part and as a whole, and
resumed; then both runs are audited and counted.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from rollstream.streams.records import Admitted, GroupClosed, Prompt, StepDone, Take
from testbed.recount import places_of, recount
from testbed.run_driver import HERE, RunDriver, set_words
from testbed.run_process import GROUPS, assert_the_log_adds_up, random_model, read, started

AT, END, STEPS = 4, 18, 40
UNEVEN = "task.name=tests.support.uneven_task:Uneven"
PARENT = [UNEVEN, f"trainer.steps={STEPS}", "checkpoints.keep=20"]


@pytest.mark.long
def test_a_fork_of_a_living_run_continues_under_kills_and_both_are_clean(tmp_path: Path) -> None:
    folder, fork = tmp_path / "run", tmp_path / "fork"
    changed = set_words([f"trainer.steps={END}", "dispatch.lease_s=3", "trainer.lease_s=3"])
    with started(folder, random_model(tmp_path / "model"), PARENT) as parent:
        parent.wait_for_step(AT + 1)
        line = ("fork", str(folder), "--at", str(AT), "--out", str(fork), *changed, "--json")
        assert json.loads(HERE.run(*line).stdout)["step"] == AT
        parent.wait_complete()
    assert_the_log_adds_up(folder, STEPS)
    before = parent.audit("--whole")
    with RunDriver(fork) as run:
        run.start()
        run.wait_for_step(AT + 3)
        run.kill("trainer")
        run.wait_for_step(AT + 6)
        run.newest().kill()
        run.start()
        run.wait_complete()
    began = re.findall(r"resumes after step (\d+)", (fork / "logs" / "trainer.log").read_text())
    assert int(began[0]) == AT
    assert min(map(int, began)) == AT
    assert parent.audit("--whole") == before
    assert_fork_is_whole(folder, fork)


def assert_fork_is_whole(folder: Path, fork: Path) -> None:
    assert RunDriver(fork).audit()["violations"] == 0
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
