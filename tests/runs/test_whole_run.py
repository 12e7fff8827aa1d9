"""The whole dataflow in one process, judged by its log (invariants 1, 2, 3, 5)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.settings import DispatchSettings
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.streams.records import (
    Admitted,
    Applied,
    Assignment,
    GroupClosed,
    StepDone,
    Take,
    Trajectory,
)
from testbed.waiting import let_pass
from tests.support.shares import one_of
from tests.support.tiny_run import TinyRun, tiny_run

DISPATCH_S = 1.0
POLICIES = ("in_flight", "in_flight_recompute", "keep_version")


def taken_groups(run: TinyRun) -> list[int]:
    return [g.group for take in run.records("ledger", Take) for g in take.groups]


def assert_every_group_has_one_ending(run: TinyRun) -> None:
    """Invariant 1: trained, or closed with a reason, or open; never two of them."""
    admitted = [record.group for record in run.records("admissions", Admitted)]
    trained = taken_groups(run)
    closed = [record.group for record in run.records("ledger", GroupClosed)]
    assert len(set(admitted)) == len(admitted)
    ended = Counter(trained + closed)
    assert max(ended.values()) == 1
    assert set(ended) <= set(admitted)


def assert_no_trajectory_was_trained_twice(run: TinyRun) -> None:
    """Invariant 2."""
    used = [m.trajectory for take in run.records("ledger", Take) for m in take.members]
    assert len(set(used)) == len(used)


def assert_spans_tile(run: TinyRun) -> None:
    """Invariant 3."""
    for record in run.records("trajectories", Trajectory):
        edges = [0, *(span.end for span in record.spans)]
        assert [span.start for span in record.spans] == edges[:-1]
        assert edges[-1] == len(record.logprobs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_trains_every_step_and_the_counts_add_up(tmp_path: Path, policy: str) -> None:
    rollout = RolloutSettings(slots=8, context_max=64, status_s=0.1, on_update=policy)  # pyright: ignore[reportArgumentType]
    with tiny_run(tmp_path, rollout=rollout) as run:
        run.start_all()
        assert run.train()
        run.end()
        assert [done.step for done in run.records("ledger", StepDone)] == [1, 2, 3, 4]
        assert len(taken_groups(run)) == 4 * 3
        assert_every_group_has_one_ending(run)
        assert_no_trajectory_was_trained_twice(run)
        assert_spans_tile(run)


def test_keep_version_gives_every_trajectory_one_version(tmp_path: Path) -> None:
    """Invariant 4."""
    rollout = RolloutSettings(
        slots=8, context_max=64, status_s=0.1, on_update="keep_version", quota=4
    )
    with tiny_run(tmp_path, rollout=rollout) as run:
        run.start_all()
        assert run.train()
        run.end()
        trajectories = run.records("trajectories", Trajectory)
        assert {len(record.spans) for record in trajectories} == {1}
        applied = {a.version.number for a in run.records("applied", Applied)}
        assert len(applied) > 1, "the last groups need a version above 0; any may be passed over"


def test_max_lag_zero_trains_nothing_stale(tmp_path: Path) -> None:
    """Invariant 5: the synchronous schedule."""
    with tiny_run(tmp_path, dispatch=DispatchSettings(max_lag=0, heartbeat_timeout_s=1.0)) as run:
        run.start_all()
        assert run.train()
        run.end()
        lags = [d.metrics["lag_consumed_max"] for d in run.records("ledger", StepDone)]
        assert lags == [0, 0, 0, 0]
        assert sum(d.counts["masked_tokens"] for d in run.records("ledger", StepDone)) == 0


@pytest.mark.long
def test_an_update_slower_than_the_heartbeat_timeout_generates_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before heartbeats had a thread, a rollout was declared dead at each version."""
    update, engines, slowed = TorchEngine.update, list[TorchEngine](), list[int]()

    def slow(engine: TorchEngine, *given: Any) -> None:
        if engine.running():
            engines.append(engine)
        if engine in engines[:1]:  # statuses of the other rollout arrive
            let_pass(3 * DISPATCH_S)
            slowed.append(1)
        update(engine, *given)

    monkeypatch.setattr(TorchEngine, "update", slow)
    dispatch = DispatchSettings(max_lag=8, heartbeat_timeout_s=DISPATCH_S)
    with tiny_run(tmp_path, dispatch=dispatch, tokens_max=48, trainer={"steps": 5}) as run:
        run.start_all()
        assert run.train()
        run.end()
        orders = run.records("assignments", Assignment)
        assert slowed
        assert {order.attempt for order in orders} == {1}


def test_several_updates_per_step_make_one_version(tmp_path: Path) -> None:
    with tiny_run(tmp_path, trainer={"updates_per_step": 2, "steps": 2}) as run:
        run.start_all()
        assert run.train()
        run.end()
        updates = {(take.step, take.update) for take in run.records("ledger", Take)}
        assert updates == {(1, 0), (1, 1), (2, 0), (2, 1)}
        assert len(taken_groups(run)) == 2 * 3


def test_a_task_of_several_turns_is_trained_on_its_generated_tokens(tmp_path: Path) -> None:
    task = TaskSettings(name="scripted")
    with tiny_run(tmp_path, task=task, tokens_max=24, trainer={"steps": 2}) as run:
        run.start_all()
        assert run.train()
        run.end()
        assert_spans_tile(run)
        trajectories = run.records("trajectories", Trajectory)
        assert any(2 in record.sources for record in trajectories), "an environment answered"


@pytest.mark.parametrize("fault", one_of(3, ["raises", "nan", "hangs"]))
def test_a_reward_that_fails_is_a_counted_death_and_the_group_closes(
    tmp_path: Path, fault: str
) -> None:
    """Invariant 1: never a dead rollout. Every second prompt's rewards fail."""
    task = TaskSettings(
        name="tests.runs.failing_task:Failing", options={"fault": fault}, reward_timeout_s=0.3
    )
    with tiny_run(tmp_path, task=task, trainer={"steps": 2, "samples_per_group": 2}) as run:
        run.start_all()
        assert run.train()
        run.end()
        closed = run.records("ledger", GroupClosed)
        assert {record.reason for record in closed} == {"dead"}
        assert all("reward" in record.detail for record in closed)
        assert_every_group_has_one_ending(run)
        trained = set(taken_groups(run))
        assert trained
        assert all(group % 2 == 0 for group in trained)
