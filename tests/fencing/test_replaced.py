"""Roles without a lease that meet a higher term of their own name exit and log the reason."""

from pathlib import Path

import numpy as np
import pytest

from rollstream.errors import Fenced
from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.storage.relay.relay import Relay
from rollstream.storage.settings import RelaySettings
from rollstream.streams.bus import Bus
from rollstream.streams.records import Assignment, RelayStatus
from rollstream.streams.topics import catalogue, partition_of
from rollstream.streams.values import Sampling, Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus, MemoryStore


@pytest.fixture
def bus() -> Bus:
    made = MemoryBus()
    made.create(catalogue(2))
    return made


def order(bus: Bus, writer: FencedWriter, rollout: str, term: int) -> None:
    ordered = Assignment(
        kind="start", trajectory="0.0", group=0, index=0, attempt=1, rollout=rollout,
        rollout_term=term, version=Version(0, 1), task="t", tokens=np.zeros(1, np.uint32),
        sampling=Sampling(), seed=0,
    )  # fmt: skip
    partition = partition_of(rollout.encode(), bus.partitions("assignments"))
    writer.append([("0.0", ordered, partition)])


def test_a_rollout_exits_at_an_assignment_to_its_successor_and_at_no_other(bus: Bus) -> None:
    writer = FencedWriter(bus, "assignments", "dispatch", 1)
    writer.open()
    orders = AssignmentQueue(bus, "rollout-0", 2)
    for rollout, term in (("rollout-0", 1), ("rollout-1", 9), ("rollout-0", 2)):
        order(bus, writer, rollout, term)
    assert orders.read() == []
    assert [waiting.rollout_term for waiting in orders.waiting] == [2]
    order(bus, writer, "rollout-0", 3)
    with pytest.raises(Fenced, match="of term 2 was replaced in term 3"):
        orders.read()


def test_a_relay_exits_when_another_has_its_name(bus: Bus, tmp_path: Path) -> None:
    relay = Relay(bus, MemoryStore(), RelaySettings(), "relay", tmp_path)
    try:
        relay.follow()
        newer = RelayStatus(
            relay="relay", term=relay.term + 1, node="b", url="", versions=(), upstream="bucket",
            time_s=0.0,
        )  # fmt: skip
        publish(bus, "status", f"relay/{newer.term}", newer)
        with pytest.raises(Fenced, match="was replaced in term 2"):
            relay.follow()
    finally:
        relay.close()
