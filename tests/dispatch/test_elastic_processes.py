"""Rollouts join and leave a living run, preemptible ones hand everything over when they are
stopped, and a standby takes over from a dead dispatch: as real processes.
"""

import signal
from pathlib import Path

import pytest

from rollstream.streams.records import Assignment, Partial, RolloutStatus, StepDone, Trajectory
from testbed.kills.aims import Aim, AimFolder
from testbed.run_driver import HERE, RunDriver, RunProcess
from testbed.run_process import assert_the_log_adds_up, by_hand, read, started

STEPS = 30
PACED = [
    "rollouts.engine=paced", "trainer.learner=paced", "paced.time_scale=0.25",
    "paced.lengths.median=50", "paced.lengths.p99=60", "paced.emit_every=4",
    "paced.weights_bytes=100000", "paced.train_step_s=0.01", "trainer.steps=3",
    "truncate=false", "dispatch.max_lag=4",
]  # fmt: skip
"""Answers of some seconds, so that one is always in progress."""
MANY = [f"trainer.steps={STEPS}", "truncate=false", "dispatch.max_lag=20"]


def finished_by(folder: Path, name: str) -> list[Trajectory]:
    return [t for t in read(folder, "trajectories", Trajectory) if t.rollout == name]


def begun(folder: Path) -> set[str]:
    return {p.trajectory for p in read(folder, "partials", Partial)}


def ended(folder: Path) -> set[str]:
    return {t.trajectory for t in read(folder, "trajectories", Trajectory)}


@pytest.mark.long
def test_a_third_rollout_joins_a_living_run_gets_work_and_leaves_by_ctrl_c(
    tmp_path: Path, model: Path
) -> None:
    """Invariants 1 and 2 afterwards; other rollouts finished what it had in progress."""
    folder = tmp_path / "run"
    with started(folder, model, [*PACED, "trainer.steps=100000"]) as run, RunDriver(folder) as user:
        run.wait_for_step(1)
        third = user.start("third", command="rollout")
        run.wait_for(lambda: len(finished_by(folder, "third")) >= 3)
        assert third.stop(signal.SIGINT) == 143, third.describe()
        orders = [o for o in read(folder, "assignments", Assignment) if o.rollout == "third"]
        run.wait_for(lambda: {o.trajectory for o in orders} <= ended(folder))
        run.newest().stop(signal.SIGINT)
    HERE.run("audit", str(folder))
    statuses = [s for s in read(folder, "status", RolloutStatus) if s.rollout == "third"]
    assert (statuses[-1].health, statuses[-1].running, statuses[-1].waiting) == ("leaving", 0, 0)


@pytest.mark.long
def test_a_preemptible_rollout_gives_everything_up_within_its_grace_and_exits_0(
    tmp_path: Path, model: Path
) -> None:
    """Promise 1: the rollout that resumes has every token generated before."""
    folder = tmp_path / "run"
    slow = ["paced.time_scale=1", "rollouts.partial_tokens=8"]  # started, but far from finished
    with by_hand(folder, model, [*PACED, *slow]) as run:
        for name in ("trainer", "prompts", "dispatch", "archive"):
            run.start(name)
        with RunDriver(folder) as user:
            spot = user.start("spot", "--preemptible", "--grace", "30", command="rollout")
            run.wait_for(lambda: finished_by(folder, "spot"))
            run.wait_for(lambda: begun(folder) - ended(folder))
            assert spot.stop() == 0, spot.describe()
        statuses = [s for s in read(folder, "status", RolloutStatus) if s.rollout == "spot"]
        assert all(status.preemptible for status in statuses)
        assert (statuses[-1].health, statuses[-1].running) == ("leaving", 0)
        given_up = {p.trajectory for p in read(folder, "partials", Partial) if p.last}
        assert given_up, "nothing was in progress"
        run.start("rollout-0")
        run.wait_complete()
    assert_the_log_adds_up(folder, 3)
    gained = {p.trajectory: len(p.tokens) for p in read(folder, "partials", Partial) if p.last}
    resumed = {
        o.trajectory: o
        for o in read(folder, "assignments", Assignment)
        if o.rollout == "rollout-0" and o.attempt == 2
    }
    kept = [t for t, count in gained.items() if count]
    assert kept
    assert all(resumed[t].partial is not None for t in kept if t in resumed)


def leads(dispatch: RunProcess) -> bool:
    return "dispatch term" in dispatch.text


def both_dispatches(run: RunDriver) -> tuple[RunProcess, RunProcess]:
    """The leader and its standby."""
    first = run.start("dispatch")
    run.wait_for(lambda: leads(first))
    return first, run.start("dispatch")


@pytest.mark.slow
def test_a_standby_takes_over_from_a_dispatch_that_was_killed(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    with by_hand(folder, model, [*MANY, "dispatch.lease_s=20"]) as run:
        for name in ("trainer", "prompts", "rollout-0", "archive"):
            run.start(name)
        leader, standby = both_dispatches(run)
        run.wait_for(lambda: read(folder, "ledger", StepDone) != [])
        assert not leads(standby)
        leader.kill()
        run.wait_for(lambda: leads(standby))
        run.wait_complete()
    assert_the_log_adds_up(folder, STEPS)


@pytest.mark.long
def test_a_run_with_a_standby_outlives_a_dispatch_that_stands_still(
    tmp_path: Path, model: Path
) -> None:
    """`dispatch.standby`: no death is seen, so the supervisor does not restart it; it comes back as
    a zombie.
    """
    folder = tmp_path / "run"
    more = [*MANY, "trainer.steps=120", "dispatch.standby=true", "dispatch.lease_s=1"]
    aims = AimFolder(tmp_path / "aims")
    with started(folder, model, more, aims) as run:
        run.wait_for(lambda: read(folder, "ledger", StepDone) != [])
        logs = {name: folder / "logs" / f"{name}.log" for name in ("dispatch", "dispatch-standby")}
        # Whichever was faster holds the lease.
        leader, other = sorted(logs, key=lambda name: "term 1" not in logs[name].read_text())
        aims.aim(Aim(leader, "append assignments", "after", nth=0, deed="STOP"))
        run.wait_for(lambda: all(aims.fired()))
        stopped = run.role(leader)
        run.wait_for(lambda: "dispatch term 2" in logs[other].read_text())
        stopped.send_signal(signal.SIGCONT)
        run.wait_complete()
    assert_the_log_adds_up(folder, 120)
