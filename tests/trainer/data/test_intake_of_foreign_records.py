"""`trajectories` and `annotations` have many writers: an invalid record of one of them ends no
run.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.errors import DecodeError
from rollstream.streams.bus import Bus
from rollstream.streams.reader import from_begin
from rollstream.streams.records import Admitted, Annotation, Trajectory
from rollstream.streams.topics import catalogue, partition_of
from rollstream.streams.values import Address, Span, Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus

RECORD = Trajectory(
    trajectory="0.0",
    group=0,
    index=0,
    attempt=1,
    task="remainder",
    rollout="a",
    rollout_term=1,
    tokens=np.array([3, 4], np.uint32),
    sources=np.array([0, 1], np.uint8),
    logprobs=np.array([-0.5], np.float32),
    spans=(Span(0, 1, Version(0, 1)),),
    finish="stop",
    reward=None,
    trainer_version=Version(0, 1),
    started_s=0.0,
    finished_s=1.0,
)


@dataclass
class Opened:
    bus: Bus
    intake: GroupIntake


@pytest.fixture
def opened() -> Opened:
    return open_intake(partitions=1)


def open_intake(partitions: int) -> Opened:
    """Group 0 is admitted."""
    bus = MemoryBus()
    bus.create(catalogue(partitions))
    writer = FencedWriter(bus, "admissions", "dispatch", 1)
    writer.open()
    writer.append([("0", Admitted(0, 0, ("0.0",), 60.0, Address(0, 0)))])
    positions = {topic: from_begin(bus, topic) for topic in GroupIntake.TOPICS}
    return Opened(bus, GroupIntake(bus, positions, lambda: 0.0))


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf")]])
def test_an_annotation_that_is_no_number_is_counted_and_not_used(opened: Opened, values: list):
    publish(opened.bus, "trajectories", "0", RECORD)
    wrong = Annotation("0.0", 0, "reward", np.array(values, np.float32), "scorer")
    publish(opened.bus, "annotations", "0", wrong)
    opened.intake.read()
    assert opened.intake.counts["malformed"] == 1
    assert not opened.intake.open[0].is_complete()
    right = Annotation("0.0", 0, "reward", np.array([1.0], np.float32), "scorer")
    publish(opened.bus, "annotations", "0", right)
    opened.intake.read()
    assert opened.intake.open[0].is_complete()


def test_the_first_completion_wins_and_the_second_is_a_duplicate(opened: Opened):
    """Invariant 2, whatever the attempt."""
    publish(opened.bus, "trajectories", "0", msgspec.structs.replace(RECORD, attempt=2))
    publish(opened.bus, "trajectories", "0", RECORD)
    opened.intake.read()
    assert opened.intake.open[0].arrived["0.0"].record.attempt == 2
    assert opened.intake.counts["duplicate"] == 1


def test_a_completion_of_a_group_that_is_not_open_is_late(opened: Opened):
    """Invariant 2."""
    publish(opened.bus, "trajectories", "7", msgspec.structs.replace(RECORD, group=7))
    opened.intake.read()
    assert opened.intake.counts["late"] == 1


def test_a_log_probability_that_is_no_number_makes_a_dead_member_not_a_dead_update():
    broken = msgspec.structs.replace(RECORD, logprobs=np.array([np.nan], np.float32))
    with pytest.raises(DecodeError, match="not finite"):
        sample_of(broken, 0.0, 1.0)


def test_a_completion_in_another_partition_than_its_groups_is_counted_and_not_used():
    """Otherwise the first of two would depend on the order in which partitions are read."""
    found = open_intake(partitions=2)
    bus, intake, note = found.bus, found.intake, np.array([1.0], np.float32)
    other = 1 - partition_of(b"0", 2)
    publish(bus, "trajectories", "0", RECORD, other)
    publish(bus, "annotations", "0", Annotation("0.0", 0, "reward", note, "scorer"), other)
    intake.read()
    assert intake.counts == {"misplaced": 2}
    assert not intake.open[0].arrived
    at = publish(bus, "trajectories", "0", RECORD)
    intake.read()
    assert intake.open[0].arrived["0.0"].member.at == at
