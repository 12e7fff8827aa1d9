"""Whole runs under each kind of pace (invariant 5), with groups that are filtered and refilled, and
with rollouts that act while dispatch is away.
"""

import threading
from pathlib import Path

import pytest

from rollstream.consumers.settings import DispatchSettings
from rollstream.producers.settings import TaskSettings
from rollstream.storage.terms import next_term
from rollstream.streams.records import Admitted, Assignment, GroupClosed, StepDone, Take, Trajectory
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.waiting import WAIT_S, wait_for
from tests.dispatch.test_recovery import status
from tests.support.tiny_run import TinyRun, tiny_run

HALF_EQUAL = TaskSettings(name="tests.dispatch.odd_rewards:HalfEqual")


def trained(run: TinyRun) -> set[int]:
    return {group.group for take in run.records("ledger", Take) for group in take.groups}


@pytest.mark.parametrize("max_lag", [None, 0, 2])
def test_filtered_groups_are_refilled_and_no_step_is_short(
    tmp_path: Path, max_lag: int | None
) -> None:
    """DAPO's dynamic sampling: every second group has equal rewards, and none of them stalls
    admission; trained groups obey the lag.
    """
    dispatch = DispatchSettings(max_lag=max_lag, heartbeat_timeout_s=1.0)
    trainer = {"filter_equal_rewards": True, "steps": 5}
    with tiny_run(tmp_path, dispatch=dispatch, task=HALF_EQUAL, trainer=trainer) as run:
        run.start_all()
        assert run.train()
        run.end()
        closed = {c.group: c.reason for c in run.records("ledger", GroupClosed)}
        filtered = {group for group, reason in closed.items() if reason == "filtered"}
        assert len(trained(run)) == 5 * 3
        assert filtered
        assert not filtered & trained(run)
        assert {group for group in trained(run) if group % 2 == 0} == set()
        admitted = {a.group for a in run.records("admissions", Admitted)}
        assert trained(run) | set(closed) <= admitted
        lags = [d.metrics["lag_consumed_max"] for d in run.records("ledger", StepDone)]
        assert max_lag is None or max(lags) <= max_lag


def test_rollouts_continue_with_their_assignments_while_dispatch_is_away(tmp_path: Path) -> None:
    """All assigned trajectories finish without it, and the next dispatch continues from there."""
    dispatch = DispatchSettings(max_lag=2, heartbeat_timeout_s=600.0, queue_per_slot=2.0)
    away = threading.Event()
    with tiny_run(tmp_path, dispatch=dispatch, tokens_max=40) as run:
        run.start_prompts(1)
        trainer = run.build_trainer(1)  # version 0
        run.start_dispatch(1, away)
        run.start_rollout("rollout-0")
        wait_for(lambda: run.records("assignments", Assignment))
        away.set()
        ordered = {o.trajectory for o in run.records("assignments", Assignment)}
        wait_for(lambda: ordered <= {t.trajectory for t in run.records("trajectories", Trajectory)})
        run.start_dispatch(2)
        assert trainer.run(threading.Event())
        run.end()
        assert len(trained(run)) == 4 * 3
        attempts = {o.attempt for o in run.records("assignments", Assignment)}
        assert attempts == {1}, "nothing was generated twice"


def pretend(run: TinyRun, stop: threading.Event) -> None:
    """A rollout that lives, takes one assignment, and never acts on it."""
    next_term(run.store, "rollouts", "ghost")
    while not stop.wait(0.1):
        ordered = any(o.rollout == "ghost" for o in run.records("assignments", Assignment))
        health = "draining" if ordered else "generating"
        ghost = status("ghost", version=Version(0, 1), slots=1, health=health)
        publish(run.bus, "status", "ghost/1", ghost)


def test_one_stuck_sample_holds_no_step_its_group_is_trained_with_its_survivors(
    tmp_path: Path,
) -> None:
    """Without it the run would lack a group: only as many as it trains are admitted."""
    dispatch = DispatchSettings(max_lag=8, heartbeat_timeout_s=600.0)
    with tiny_run(tmp_path, dispatch=dispatch) as run:
        run.start_prompts(1)
        trainer = run.build_trainer(1)
        run.start_dispatch(1)
        ghost = threading.Thread(target=pretend, args=(run, run.stop), daemon=True)
        ghost.start()
        wait_for(lambda: run.records("assignments", Assignment))
        run.start_rollout("rollout-0")
        run.pass_deadlines(lambda groups: groups == 12 and run.finished() == 47)
        assert trainer.run(threading.Event())
        run.end()
        ghost.join(WAIT_S)
        members = {
            g.group: len(g.members) for take in run.records("ledger", Take) for g in take.groups
        }
        assert len(members) == 4 * 3
        assert sorted(members.values())[:2] == [3, 4], "one of one group never came"
