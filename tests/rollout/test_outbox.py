"""Records that a rollout sends beside decoding: in order, with addresses, bounded, every failure
raised, and a record that the log cannot hold refused alone.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.errors import BusError
from rollstream.producers.rollout.sender import RECORDS_MAX, BackgroundSender
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Annotation
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address
from rollstream.streams.writer import KeyedRecord
from testbed.waiting import WAIT_S


@pytest.fixture
def bus(tmp_path: Path) -> SqliteBus:
    bus = open_bus(f"sqlite:{tmp_path}")
    bus.create(catalogue(1))
    assert isinstance(bus, SqliteBus)
    return bus


def notes(first: int, count: int, width: int = 1) -> list[KeyedRecord]:
    values = np.ones(width, np.float32)
    return [
        ("1", Annotation(f"1.{n}", 1, "reward", values, "test"))
        for n in range(first, first + count)
    ]


def published(bus: SqliteBus) -> list[str]:
    reader = TopicReader(bus, "annotations", from_begin(bus, "annotations"))
    return [
        r.record.trajectory for r in reader.poll(0.0, 10_000) if isinstance(r.record, Annotation)
    ]


def test_records_keep_their_order_and_get_their_addresses(bus: SqliteBus):
    outbox, addresses = BackgroundSender(bus), list[Address]()
    for first in range(0, 60, 3):
        outbox.send("annotations", notes(first, 3), addresses.extend)
    outbox.flush()
    assert published(bus) == [f"1.{n}" for n in range(60)]
    assert addresses == [Address(0, n) for n in range(60)]


def test_a_sender_above_the_bound_waits_until_its_records_are_durable(bus: SqliteBus):
    """Invariant 8: the queue is bounded."""
    outbox, held, go = BackgroundSender(bus), threading.Event(), threading.Event()

    def hold(_: list[Address]) -> None:
        held.set()
        assert go.wait(WAIT_S)

    outbox.send("annotations", notes(0, 1), hold)
    assert held.wait(WAIT_S)
    outbox.send("annotations", notes(1, RECORDS_MAX), None)
    late = threading.Thread(target=outbox.send, args=("annotations", notes(RECORDS_MAX + 1, 1)))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    go.set()
    late.join(WAIT_S)
    outbox.flush()
    assert len(published(bus)) == RECORDS_MAX + 2


def test_an_append_that_fails_is_raised_by_the_next_call(bus: SqliteBus):
    outbox = BackgroundSender(bus)
    outbox.send("no such topic", notes(0, 1))
    with pytest.raises(BusError):
        outbox.flush()
    with pytest.raises(BusError):
        outbox.send("annotations", notes(1, 1))
    assert published(bus) == []


ODD_NOTES = {
    "half an emoji": lambda note: replace(note, reason="tool said \ud83d"),
    "half an emoji in the key": None,
    "an array of another type": lambda note: replace(note, values=np.ones(2, np.float64)),
    "no array": lambda note: replace(note, values=None),
    "a value that JSON has not": lambda note: replace(note, scorer=object()),
    "not finite": lambda note: replace(note, group=float("inf")),
    "deep": lambda note: replace(note, scorer=deep(5000)),
}


def deep(levels: int) -> object:
    inner: object = ""
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize("what", ODD_NOTES)
def test_a_record_that_does_not_encode_is_refused_and_all_others_are_published(
    bus: SqliteBus, what: str
):
    outbox, addresses, refused = BackgroundSender(bus), list[Address](), dict[int, str]()
    sent: list[KeyedRecord] = notes(0, 3)
    key, record = sent[1][0], sent[1][1]
    change = ODD_NOTES[what]
    sent[1] = (key, change(record)) if change is not None else ("\ud83d", record)
    outbox.send("annotations", sent, addresses.extend, on_refused=refused.__setitem__)
    outbox.send("annotations", notes(3, 2), addresses.extend)
    outbox.flush()
    outbox.send("annotations", notes(5, 1), addresses.extend)
    outbox.flush()
    assert published(bus) == ["1.0", "1.2", "1.3", "1.4", "1.5"]
    assert [at.offset for at in addresses] == [0, 1, 2, 3, 4]
    assert list(refused) == [1]
    "".join(refused.values()).encode()


def test_a_record_above_the_topics_bound_is_refused_alone(bus: SqliteBus):
    limit, refused = bus.settings("annotations").record_bytes_max, dict[int, str]()
    outbox = BackgroundSender(bus)
    outbox.send("annotations", notes(0, 1, width=limit), on_refused=refused.__setitem__)
    outbox.send("annotations", notes(1, 1))
    outbox.flush()
    assert published(bus) == ["1.1"]
    assert "above" in refused[0]
