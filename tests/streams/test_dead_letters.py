"""Undecodable bytes are appended to `dead` once, by the one role that acts on the topic, whichever
roles also read them and however often that role restarts.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from rollstream.errors import BusTimeout
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.dead_letters import (
    ORIGINAL_BYTES_MAX,
    DeadLetterReader,
    DeadLetterWriter,
)
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Dead, Position
from rollstream.streams.topics import DEAD_RETENTION_S, Topic, catalogue
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus
from testbed.sample_records import trajectory

TOPIC = "trajectories"


@pytest.fixture
def run() -> Bus:
    bus = MemoryBus()
    bus.create(catalogue())
    return bus


class LosesAcknowledgements:
    """A bus whose appends succeed, but of which the first `lost` are reported as timed out."""

    def __init__(self, bus: Bus, lost: int) -> None:
        self.bus, self.lost = bus, lost

    def __getattr__(self, name: str) -> object:
        return getattr(self.bus, name)

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        offsets = self.bus.append(topic, entries)
        if self.lost:
            self.lost -= 1
            raise BusTimeout("no acknowledgement came")
        return offsets


def owner(bus: Bus, positions: dict[int, Position] | None = None) -> TopicReader:
    """The role that acts on the topic, from its begin or from a checkpoint."""
    letters = DeadLetterWriter(bus, TOPIC)
    return TopicReader(bus, TOPIC, positions or from_begin(bus, TOPIC), dead_letters=letters)


def junk(bus: Bus, *texts: bytes, partition: int = 0) -> None:
    bus.append(TOPIC, [AppendEntry(b"7", text, partition) for text in texts])


def letters(bus: Bus) -> list[Dead]:
    reader = TopicReader(bus, "dead", from_begin(bus, "dead"))
    return [received.record for received in reader.read_to(bus.end("dead"))]  # type: ignore[misc]


def test_what_is_no_record_goes_to_dead_with_its_bytes_and_the_reason(run: Bus) -> None:
    publish(run, TOPIC, "7", trajectory(4), 0)
    junk(run, b"no record")
    publish(run, TOPIC, "7", trajectory(6), 0)
    reader = owner(run)
    assert len(reader.poll()) == 2
    assert reader.dead == 1
    (dead,) = letters(run)
    assert dead.original.tobytes() == b"no record"
    assert (dead.partition, dead.offset, dead.cut) == (0, 1, 0)
    assert "too few for a record" in dead.reason


def test_other_readers_only_count(run: Bus) -> None:
    junk(run, b"no record")
    reader = TopicReader(run, TOPIC, from_begin(run, TOPIC))
    assert reader.poll() == []
    assert reader.dead == 1
    assert letters(run) == []


def test_a_restarted_owner_appends_no_second_copy(run: Bus) -> None:
    junk(run, b"one", b"two")
    junk(run, b"other", partition=2)
    checkpoint = from_begin(run, TOPIC)
    owner(run).poll()
    junk(run, b"three")
    again = owner(run, checkpoint)
    again.poll()
    assert again.dead == 4
    assert sorted((d.partition, d.offset) for d in letters(run)) == [(0, 0), (0, 1), (0, 2), (2, 0)]


def test_an_append_in_doubt_moves_no_position_and_leaves_no_second_copy(run: Bus) -> None:
    junk(run, b"no record")
    reader = owner(LosesAcknowledgements(run, 1))  # type: ignore[arg-type]
    with pytest.raises(BusTimeout):
        reader.poll()
    assert reader.positions == from_begin(run, TOPIC)
    assert reader.poll() == []
    assert reader.dead == 1
    assert len(letters(run)) == 1


def test_a_forged_letter_of_what_is_not_there_yet_keeps_nothing_out(run: Bus) -> None:
    publish(run, "dead", "x", Dead(TOPIC, 0, 1 << 40, "", np.zeros(1, np.uint8)))
    run.append("dead", [AppendEntry(b"x", b"no record")])
    junk(run, b"no record")
    owner(run).poll()
    assert [d.original.tobytes() for d in letters(run)][-1] == b"no record"


def test_a_large_original_is_cut_and_marked(run: Bus) -> None:
    junk(run, bytes(ORIGINAL_BYTES_MAX + 7))
    owner(run).poll()
    (dead,) = letters(run)
    assert (len(dead.original), dead.cut) == (ORIGINAL_BYTES_MAX, ORIGINAL_BYTES_MAX + 7)


def test_letters_of_a_run_of_0_1_0_stay_readable_and_are_not_repeated(run: Bus) -> None:
    run.create([Topic(f"{TOPIC}.dead", 1, "time", DEAD_RETENTION_S)])
    junk(run, b"one", b"two")
    publish(run, f"{TOPIC}.dead", "7", Dead(TOPIC, 0, 0, "by 0.1.0", np.zeros(1, np.uint8)))
    owner(run).poll()
    assert [(dead.partition, dead.offset) for dead in letters(run)] == [(0, 1)]
    both = DeadLetterReader(run, (TOPIC,))
    assert sorted(dead.offset for dead in both.read()) == [0, 1]
    assert both.is_whole
    assert list(both.read()) == []


def test_a_run_has_one_topic_of_dead_letters() -> None:
    names = [topic.name for topic in catalogue()]
    assert len(names) == 11
    assert sum(topic.partitions for topic in catalogue()) == 23
    assert [name for name in names if "dead" in name] == ["dead"]
