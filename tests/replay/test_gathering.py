"""Other records of a log do not keep trainable trajectories from being gathered."""

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.errors import ConfigurationError
from rollstream.keep.replay.gathering import (
    LabelledSource,
    RecordedSource,
    check_tokens,
    gather_sources,
)
from rollstream.streams.admissible import TrainingBounds
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Span, Version
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus

VOCABULARY = 10


def completion(group: int, index: int, **changed: object) -> Trajectory:
    record = Trajectory(
        f"{group}.{index}", group, index, 1, "hand", "r", 1, np.array([3, 4, 5, 6], np.uint32),
        np.array([0, 0, 1, 1], np.uint8), np.array([-1, -2], np.float32),
        (Span(0, 2, Version(7, 1)),), "stop", float(index), Version(7, 1), 0.0, 1.0,
    )  # fmt: skip
    return replace(record, **changed)


def log() -> MemoryBus:
    bus = MemoryBus()
    bus.create(catalogue(1))
    return bus


def test_what_cannot_be_trained_is_left_out_and_counted_by_kind():
    source, target = log(), log()
    beyond = np.array([3, 4, 5, VOCABULARY], np.uint32)
    nothing = np.array([-1, np.nan], np.float32)
    records = [
        completion(0, 0, tokens=beyond),  # its group has other members
        completion(0, 1),
        completion(1, 0, logprobs=nothing),  # its group has none
        completion(2, 0),
        completion(2, 1, finish="dead", reason="no room", tokens=beyond),
    ]
    for record in records:
        publish(source, "trajectories", str(record.group), record)
    bounds, sources = TrainingBounds(VOCABULARY), [LabelledSource("run", RecordedSource(source))]
    counts = gather_sources(sources, target, bounds, lambda trajectory: trajectory.record, "here")
    assert counts == {"trajectories": 3, "groups": 2, "refused_tokens": 1, "refused_logprobs": 1}
    reader = TopicReader(target, "trajectories", from_begin(target, "trajectories"))
    found = [received.record for received in reader.read_to(target.end("trajectories"))]
    assert [(r.trajectory, r.group) for r in found if isinstance(r, Trajectory)] == [
        ("run/0.1", 0), ("run/2.0", 1), ("run/2.1", 1),
    ]  # fmt: skip


def test_a_file_of_another_tokenizer_is_refused_before_anything_is_gathered():
    with pytest.raises(ConfigurationError, match="is it of another tokenizer"):
        check_tokens("mine", completion(0, 0), 6)
