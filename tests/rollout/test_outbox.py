"""Records that a rollout sends beside decoding: in order, with addresses, bounded, every failure
raised.
"""

import threading
from pathlib import Path

import numpy as np
import pytest

from rollstream.errors import RecordTooLarge
from rollstream.producers.rollout.publisher import RECORDS_MAX, BackgroundSender
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


def test_what_fails_is_raised_by_the_next_call(bus: SqliteBus):
    limit = bus.settings("annotations").record_bytes_max
    outbox = BackgroundSender(bus)
    outbox.send("annotations", notes(0, 1, width=limit))
    with pytest.raises(RecordTooLarge):
        outbox.flush()
    with pytest.raises(RecordTooLarge):
        outbox.send("annotations", notes(1, 1))
    assert published(bus) == []
