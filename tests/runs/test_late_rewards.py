"""Late rewards through the whole dataflow: which samples are trained, which are left out, and what
a restarted trainer repeats.
"""

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.scoring.scorer import AnnotationPlan, Scorer
from rollstream.producers.settings import TaskSettings
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Annotation, GroupClosed, Prompt, StepDone, Take, Trajectory
from rollstream.streams.writer import publish
from testbed.waiting import WAIT_S, wait_for
from tests.runs.test_resume import hashes, train_until, used
from tests.runs.test_whole_run import assert_every_group_has_one_ending
from tests.support.tiny_run import TinyRun, tiny_run

LATE = TaskSettings(reward="late")


def start_scorer(run: TinyRun, function: str = "", names: tuple[str, ...] = ("reward",)) -> None:
    pool = RewardPool(run.task, function=function)
    scorer = Scorer(run.bus, pool, AnnotationPlan(names, not function, "scorer-0"), window=16)
    run.start_thread(lambda: scorer.run(run.stop))


def noted(run: TinyRun) -> dict[tuple[str, str], Annotation]:
    """The first of each (trajectory, name), counted by the test itself."""
    first: dict[tuple[str, str], Annotation] = {}
    for record in run.records("annotations", Annotation):
        first.setdefault((record.trajectory, record.name), record)
    return first


def test_rewards_come_from_a_scorer_and_every_take_names_them(tmp_path: Path) -> None:
    with tiny_run(tmp_path, task=LATE, trainer={"steps": 3}) as run:
        run.start_all()
        start_scorer(run)
        assert run.train()
        run.end()
        assert {record.reward for record in run.records("trajectories", Trajectory)} == {None}
        takes = run.records("ledger", Take)
        members = {m.trajectory for take in takes for g in take.groups for m in g.members}
        assert Counter(n.trajectory for t in takes for n in t.annotations) == Counter(members)
        assert_every_group_has_one_ending(run)
        assert max(used(run).values()) == 1


def test_annotations_named_beside_the_reward_are_terms_of_it(tmp_path: Path) -> None:
    trainer = {"steps": 2, "reward_terms": {"reward": 1.0, "length": 0.5}}
    with tiny_run(tmp_path, task=LATE, trainer=trainer) as run:
        run.start_all()
        start_scorer(run, "tests.runs.late_functions:reward_and_length", ("reward", "length"))
        assert run.train()
        run.end()
        first = noted(run)
        for done in run.records("ledger", StepDone):
            takes = [take for take in run.records("ledger", Take) if take.step == done.step]
            trained = [m.trajectory for take in takes for m in take.members]
            rewards = [
                float(first[t, "reward"].values[0]) + 0.5 * float(first[t, "length"].values[0])
                for t in trained
            ]
            assert done.metrics["reward_mean"] == pytest.approx(np.mean(rewards))


def test_a_trainer_killed_in_the_middle_repeats_its_steps_on_the_same_annotations(
    tmp_path: Path,
) -> None:
    """Contradicting annotations that came afterwards change nothing: the ledger names the first."""
    with tiny_run(tmp_path, task=LATE, trainer={"steps": 6}) as run:
        run.start_all()
        start_scorer(run, "tests.runs.late_functions:by_name")
        train_until(run, term=1, steps=3)
        before = hashes(run)
        for trajectory, name in noted(run):
            group = trajectory.partition(".")[0]
            other = Annotation(trajectory, int(group), name, np.array([99.0], np.float32), "x")
            publish(run.bus, "annotations", group, other)
        trainer = run.build_trainer(term=2)
        assert trainer.step == 0
        assert trainer.run(threading.Event())
        assert {step: hashes(run)[step] for step in before} == before
        assert all(len(found) == 1 for found in hashes(run).values()), "a repeated step differs"
        assert max(used(run).values()) == 1


def test_a_run_without_a_scorer_closes_its_groups_with_the_reason(tmp_path: Path, caplog) -> None:
    """No stall: every group ends at its deadline."""
    with tiny_run(tmp_path, task=LATE, trainer={"steps": 1}) as run:
        run.start_all()
        run.pass_deadlines(lambda groups: run.finished() == 4 * groups)
        stop = threading.Event()
        thread = threading.Thread(target=lambda: run.train(1, stop), daemon=True)
        thread.start()
        wait_for(lambda: len(run.records("ledger", GroupClosed)) >= 12)
        stop.set()
        thread.join(WAIT_S)
        closed = run.records("ledger", GroupClosed)
        assert {record.reason for record in closed} == {"expired"}
        finished = [one.detail for one in closed if "4 of 4 finished" in one.detail]
        assert finished
        assert all("0 of 4 lived: no annotation 'reward'" in detail for detail in finished)
        assert "expired: deadline of 600 s passed" in caplog.text
        assert_every_group_has_one_ending(run)


def test_unscored_samples_are_left_out_at_the_deadline_and_the_group_continues(
    tmp_path: Path,
) -> None:
    """Two of four are never scored; the others are trained, and repeated to the same bits."""
    with tiny_run(tmp_path, task=LATE, trainer={"steps": 2}) as run:
        run.start_all()
        run.start_thread(lambda: score_some(run))
        run.pass_deadlines(
            lambda groups: run.finished() == 4 * groups and len(noted(run)) == 2 * groups
        )
        assert run.train()
        done = run.records("ledger", StepDone)
        assert all(one.counts["unscored"] >= 2 for one in done)
        assert {t.rpartition(".")[2] for t in used(run)} <= {"0", "1"}
        before = hashes(run)
        delete_checkpoints(run)
        again = run.build_trainer(term=2)
        assert again.step == 0
        assert again.run(threading.Event())
        assert hashes(run) == before


def test_a_failing_function_ends_its_groups_at_once_with_its_reason(tmp_path: Path) -> None:
    """Every second group fails, without waiting for a deadline (600 s)."""
    with tiny_run(tmp_path, task=LATE, trainer={"steps": 2}) as run:
        run.start_all()
        start_scorer(run, "tests.runs.late_functions:fails_for_odd_groups")
        assert run.train()
        run.end()
        closed = run.records("ledger", GroupClosed)
        assert closed
        assert {record.reason for record in closed} == {"dead"}
        assert all("reward: RuntimeError at late_functions.py" in one.detail for one in closed)
        counts = Counter[str]()
        for done in run.records("ledger", StepDone):
            counts.update(done.counts)
        assert counts["dead"] <= len(closed)
        assert counts["unscored"] == 4 * counts["dead"]
        assert_every_group_has_one_ending(run)


def test_groups_closed_before_a_crash_are_in_their_steps_counts(tmp_path: Path) -> None:
    with tiny_run(tmp_path, task=LATE, trainer={"steps": 1}) as run:
        run.start_all(rollouts=0)
        wait_for(lambda: run.records("prompts", Prompt))
        first = run.build_trainer(term=1)
        first.take_feeder.ledger.append([GroupClosed(100, "dead", "by hand", 1)])
        first.publisher.close()
        run.start_rollout("rollout-0")
        start_scorer(run)
        assert run.train(term=2)
        (done,) = run.records("ledger", StepDone)
        assert done.counts["dead"] == 1


def score_some(run: TinyRun) -> None:
    """A scorer that omits two of four, written by the test."""
    reader = TopicReader(run.bus, "trajectories", from_begin(run.bus, "trajectories"))
    while not run.stop.is_set():
        for received in reader.poll(0.05):
            record = received.record
            assert isinstance(record, Trajectory)
            if record.index < 2:
                value = np.array([record.index], np.float32)
                note = Annotation(record.trajectory, record.group, "reward", value, "hand")
                publish(run.bus, "annotations", str(record.group), note)


def delete_checkpoints(run: TinyRun) -> None:
    for key in [entry.key for entry in run.store.list("checkpoints/")]:
        if "s00000000-" not in key:
            run.store.delete(key)
