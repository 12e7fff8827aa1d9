"""Dialogues through the whole dataflow: their environments answer late or fail, groups have more
trajectories than they need, and a rollout dies while episodes wait. The audit stays clean.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.look.report.untrained import compare_episodes
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.records import (
    GENERATED,
    Admitted,
    Assignment,
    GroupClosed,
    Partial,
    StepDone,
    Take,
    Trajectory,
)
from testbed.waiting import wait_for
from tests.index.indexed_records import read_index
from tests.runs.test_whole_run import assert_every_group_has_one_ending
from tests.support.tiny_run import Died, TinyRun, tiny_run

SLOW = "tests.support.slow_dialogues:SlowScript"
ROLLOUT = RolloutSettings(slots=2, context_max=96, status_s=0.1, partial_s=0.05, partial_tokens=1)


def task(**changed: object) -> TaskSettings:
    options = {"turns": 3, "reply_s": 0.05, "is_faulty": True} | changed.pop("options", {})  # type: ignore[operator]
    settings = {"name": SLOW, "options": options, "reply_timeout_s": 1.0} | changed
    return TaskSettings.model_validate(settings)


def assert_audit_is_clean(run: TinyRun) -> Counter[str]:
    rule = training_rule(run.trainer, run.dispatch.max_lag, run.keep_version)
    policy = AuditPolicy(run.dispatch.max_lag, run.keep_version, rule=rule)
    results = Audit(run.bus, run.store, "tiny", policy).check()
    assert [(one.number, one.offenders) for one in results if one.violations] == []
    return Counter({name: n for one in results for name, n in one.counts.items()})


def test_the_first_that_end_are_trained_and_the_rest_released(tmp_path: Path) -> None:
    trainer = {"steps": 3, "groups_per_step": 2, "samples_per_group": 3}
    with tiny_run(
        tmp_path, task=task(redundancy=2, retries=0), rollout=ROLLOUT, trainer=trainer
    ) as run:
        run.start_all()
        assert run.train()
        run.end()
        admitted = {one.group: one for one in run.records("admissions", Admitted)}
        assert {(len(one.trajectories), one.needed) for one in admitted.values()} == {(5, 3)}
        first: dict[int, dict[str, str]] = {}
        for record in run.records("trajectories", Trajectory):
            first.setdefault(record.group, {}).setdefault(record.trajectory, record.finish)
        for take in run.records("ledger", Take):
            for group in take.groups:
                assert [m.trajectory for m in group.members] == counted(first[group.group], 3)
        released = sum(done.counts.get("released", 0) for done in run.records("ledger", StepDone))
        assert released > 0
        assert_every_group_has_one_ending(run)
        assert assert_audit_is_clean(run)["released"] == released


def counted(finishes: dict[str, str], needed: int) -> list[str]:
    """The trajectories that count, by the test's own arithmetic: up to the last living one needed,
    in the order of the partition.
    """
    names: list[str] = []
    for name, finish in finishes.items():
        names.append(name)
        needed -= finish != "dead"
        if not needed:
            break
    return names


def test_a_failure_is_asked_again_and_every_reason_is_recorded(tmp_path: Path) -> None:
    trainer = {"steps": 2, "groups_per_step": 2, "samples_per_group": 4}
    with tiny_run(tmp_path, task=task(retries=1), rollout=ROLLOUT, trainer=trainer) as run:
        run.start_all()
        assert run.train()
        run.end()
        records = run.records("trajectories", Trajectory)
        dead = [one for one in records if one.finish == "dead"]
        assert {one.reason.split(":")[0] for one in dead} <= {"environment"}
        assert all(one.failures for one in dead)  # each was asked again first
        assert any(one.waiting_s for one in records)
        with read_index(LogView(run.bus, None, "")) as index:
            found = compare_episodes(index)
        assert sum(one.failed for one in found.causes) == len({one.trajectory for one in dead})
        assert {one.cause for one in found.causes} <= {"environment timeout", "environment error"}
        assert_audit_is_clean(run)


class DiesWhileWaiting(BusWrapper):
    """The bus of a rollout that dies behind a partial of a dialogue that waits for a reply."""

    def __init__(self, below: Bus) -> None:
        super().__init__(below)
        self.died = threading.Event()

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        if self.died.is_set():
            raise Died
        offsets = super().append(topic, entries)
        if topic == "partials":
            self.died.set()
            raise Died
        return offsets


def test_what_waited_in_a_dead_rollout_resumes_from_its_partial(tmp_path: Path) -> None:
    """The reply takes longer than the heartbeat time-out: all that the dead rollout had, waits."""
    trainer = {"steps": 1, "groups_per_step": 2, "samples_per_group": 2}
    slow = task(options={"reply_s": 3.0, "is_faulty": False}, reply_timeout_s=60.0)
    with tiny_run(tmp_path, task=slow, rollout=ROLLOUT, trainer=trainer) as run:
        dying = DiesWhileWaiting(run.bus)
        run.start_prompts(1)
        run.start_dispatch(1)
        run.start_rollout("rollout-0", dying=dying)
        trained = run.start_trainer()
        wait_for(dying.died.is_set)
        run.start_rollout("rollout-1")
        wait_for(trained.is_set)
        run.end()
        resumes = [one for one in run.records("assignments", Assignment) if one.kind == "resume"]
        assert resumes
        assert resumes[0].rollout == "rollout-1"
        parts = run.records("partials", Partial)
        kept = next(one for one in parts if one.trajectory == resumes[0].trajectory)
        whole = next(
            one
            for one in run.records("trajectories", Trajectory)
            if one.trajectory == resumes[0].trajectory
        )
        assert whole.attempt > 1
        end = kept.start + len(kept.tokens)
        assert whole.tokens[kept.start : end].tolist() == kept.tokens.tolist()
        # The turn's last token was left out, and is generated again before the environment's.
        assert whole.sources[end] == GENERATED
        assert not [one for one in run.records("ledger", GroupClosed) if one.reason == "dead"]
        assert_audit_is_clean(run)
