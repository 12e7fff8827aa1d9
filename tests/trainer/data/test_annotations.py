"""The effect of annotations on a group: rewards by terms, samples left out, and when it is
complete.
"""

import logging

import msgspec
import numpy as np
import pytest

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.sample import (
    AnnotatedRewards,
    annotated_rewards,
    names_needed,
)
from rollstream.consumers.trainer.data.selection import NO_ANNOTATION_S, AnnotationWatch
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.streams.admissible import REFUSED_ANNOTATIONS
from rollstream.streams.bus import Bus
from rollstream.streams.reader import from_begin
from rollstream.streams.records import Admitted, Annotation, StepDone, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus
from testbed.stepped.hand_fed_trainer import HandFed
from tests.trainer.data.test_intake_of_foreign_records import RECORD

MEMBERS = ("0.0", "0.1", "0.2")
SETTINGS = TrainerSettings(annotations=("checked",), reward_terms={"reward": 1.0, "quality": 0.5})


def member(trajectory: str, **changed) -> Trajectory:
    return msgspec.structs.replace(RECORD, trajectory=trajectory, **changed)


def note(trajectory: str, name: str, value: float | None, reason: str = "") -> Annotation:
    values = np.array([] if value is None else [value], np.float32)
    return Annotation(trajectory, 0, name, values, "scorer", reason)


def by_key(*notes: Annotation) -> dict[tuple[str, str], Annotation]:
    return {(one.trajectory, one.name): one for one in notes}


def test_a_reward_is_the_sum_of_its_terms():
    noted = by_key(note("0.0", "reward", 1.0), note("0.0", "quality", 3.0))
    terms = {"reward": 1.0, "quality": 0.5}
    found = annotated_rewards([member("0.0")], noted, ("quality", "reward"), terms)
    assert found == AnnotatedRewards({"0.0": 2.5}, {})


def test_a_sample_without_an_annotation_has_no_reward_and_a_reason():
    records = [member("0.0"), member("0.1", reward=1.0), member("0.2", finish="dead")]
    noted = by_key(note("0.0", "reward", None, "it raised"), note("0.0", "quality", 1.0))
    found = annotated_rewards(records, noted, names_needed(SETTINGS), SETTINGS.reward_terms)
    assert found.rewards == {}
    assert found.lacking == {
        "0.0": "no annotation 'checked'; reward: it raised",
        "0.1": "no annotation 'checked'; no annotation 'quality'",
    }


def test_members_that_died_and_those_unscored_are_counted_apart():
    """A group that ended as dead is not trained either."""
    records = [member(name, reward=float(n)) for n, name in enumerate(MEMBERS)]
    records += [member("0.3", finish="dead", reason="raised"), member("0.4")]
    prepared = prepare_group(0, records, {}, training_rule(TrainerSettings(), None, False), 1)
    assert prepared.ending == ""
    assert [sample.trajectory for sample in prepared.samples] == list(MEMBERS)
    assert prepared.counts == {
        "dead_members": 1, "unscored": 1, "masked_tokens": 0, "dropped": 0
    }  # fmt: skip


@pytest.fixture
def bus() -> Bus:
    """An admitted group of three, all of which finished and the last of which died."""
    one = MemoryBus()
    one.create(catalogue(1))
    writer = FencedWriter(one, "admissions", "dispatch", 1)
    writer.open()
    writer.append([("0", Admitted(0, 0, MEMBERS, 60.0, Address(0, 0)))])
    for record in (member("0.0"), member("0.1", reward=1.0), member("0.2", finish="dead")):
        publish(one, "trajectories", "0", record)
    return one


def intake_of(bus: Bus) -> GroupIntake:
    positions = {topic: from_begin(bus, topic) for topic in GroupIntake.TOPICS}
    one = GroupIntake(bus, positions, lambda: 7.0, names_needed(SETTINGS))
    one.read()
    return one


def test_a_group_is_complete_once_all_that_is_named_came(bus: Bus):
    """Dead trajectories need no annotation, nor do those with an own reward."""
    intake = intake_of(bus)
    needed = [("0.0", n) for n in ("checked", "quality", "reward")]
    needed += [("0.1", n) for n in ("checked", "quality")]
    for trajectory, name in needed:
        assert not intake.open[0].is_complete()
        publish(bus, "annotations", "0", note(trajectory, name, 1.0))
        intake.read()
    assert intake.open[0].is_complete()
    assert intake.annotated_s == 7.0


def test_an_annotation_that_marks_a_failure_completes_a_group_too(bus: Bus):
    """A failed annotation is not waited for until the deadline."""
    for trajectory in ("0.0", "0.1"):
        for name in names_needed(SETTINGS):
            publish(bus, "annotations", "0", note(trajectory, name, None, "it raised"))
    assert intake_of(bus).open[0].is_complete()


def test_the_first_annotation_in_the_log_counts(bus: Bus):
    for value in (0.25, 0.75):
        publish(bus, "annotations", "0", note("0.0", "reward", value))
    noted = intake_of(bus).open[0].annotations["0.0", "reward"]
    assert noted.record.values.tolist() == [0.25]
    assert noted.used.at.offset == 0


def test_annotations_that_the_run_does_not_name_or_of_strangers_are_not_kept(bus: Bus):
    """Invariant 8: scorers are foreign programs."""
    for one in (note("0.0", "gossip", 1.0), note("9.9", "reward", 1.0)):
        publish(bus, "annotations", "0", one)
    assert intake_of(bus).open[0].annotations == {}


def test_a_wait_for_a_scorer_that_is_down_is_reported_once_in_a_while(caplog):
    patience = AnnotationWatch(("reward",))
    with caplog.at_level(logging.WARNING):
        times = [
            100.0,
            110.0,
            100 + NO_ANNOTATION_S,
            105 + NO_ANNOTATION_S,
            100 + 2 * NO_ANNOTATION_S,
        ]
        due = [patience.check(3, annotated_s=0.0, now_s=now_s) for now_s in times]
    assert due == [False, False, True, False, True]
    assert "3 finished groups wait for annotations (reward)" in caplog.text


@pytest.mark.parametrize(("waiting", "annotated_s"), [(0, 0.0), (3, 125.0)])
def test_nothing_is_reported_while_no_group_waits_or_annotations_come(
    waiting: int, annotated_s: float
):
    patience = AnnotationWatch(("reward",))
    patience.check(3, annotated_s=0.0, now_s=100.0)
    patience.check(waiting, annotated_s=annotated_s, now_s=125.0)
    assert not patience.check(3, annotated_s=annotated_s, now_s=110 + NO_ANNOTATION_S)


def test_refused_annotations_are_counted_in_the_steps(tmp_path):
    run = HandFed(tmp_path, settings={"annotations": ("checked",)})
    run.feed(*range(6))
    for group in range(6):
        for index in (0, 1):
            good = Annotation(f"{group}.{index}", group, "checked", np.ones(1, np.float32), "s")
            bad = msgspec.structs.replace(good, values=np.array([np.nan], np.float32))
            publish(run.bus, "annotations", str(group), bad)
            publish(run.bus, "annotations", str(group), good)
    assert run.train()
    done = run.ledger(StepDone)
    assert len(done) == 2
    assert sum(one.counts.get(REFUSED_ANNOTATIONS, 0) for one in done) == 12
    assert run.offences() == []
