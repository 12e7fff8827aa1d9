"""Three brokers, three copies, two of which must hold a record. When one dies nothing stops; with
two gone writes stop; once they are back all continues. Every acknowledged record is there exactly
once.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from types import TracebackType

import pytest
from kafka import KafkaAdminClient

from rollstream.errors import BusError
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import GroupClosed
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter
from testbed.servers import use
from testbed.servers.kafka_broker import VERSION, KafkaBroker, start_three
from testbed.waiting import WAIT_S, let_pass, wait_for

SETTLE_S = 2.0  # seconds for requests in progress when a broker dies
QUIET_S = 6.0  # seconds without acknowledgements while two of three are gone
TOPIC = "ledger"
TEXT = "x" * 2000


@pytest.fixture
def brokers() -> Iterator[dict[int, KafkaBroker]]:
    """By node."""
    three = start_three()
    use("three of Apache Kafka", f"{VERSION} at {', '.join(one.server for one in three)}")
    try:
        yield dict(enumerate(three, start=1))
    finally:
        for broker in three:
            broker.close()


class Writing:
    """A single-holder role that appends numbers as fast as they are acknowledged."""

    def __init__(self, url: str) -> None:
        self._bus = open_bus(url)
        self._bus.create(catalogue())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.acknowledged: list[int] = []
        self.terms = 0

    def __enter__(self) -> "Writing":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._bus.close()

    def _write(self) -> None:
        """Acts as a role's process: a writer that stays in doubt ends; its successor has the next
        term and reads the present records before it continues.
        """
        while not self._stop.is_set():
            self.terms += 1
            writer = FencedWriter(self._bus, TOPIC, "trainer", self.terms, retry_s=WAIT_S)
            try:
                writer.open()
                number = max(found(self._bus), default=-1) + 1
                while not self._stop.is_set():
                    writer.append([("run", GroupClosed(number, "expired", TEXT, 1))])
                    self.acknowledged.append(number)
                    number += 1
            except BusError:
                let_pass(0.2)


def found(bus) -> Counter[int]:
    """How often each number is in the topic, by the rules of invariant 7."""
    reader = TopicReader(bus, TOPIC, from_begin(bus, TOPIC))
    records = [received.record for received in reader.read_to(bus.end(TOPIC))]
    return Counter(record.group for record in records if isinstance(record, GroupClosed))


def leader(server: str) -> int:
    """The node that leads the topic's partition."""
    admin = KafkaAdminClient(bootstrap_servers=server)
    try:
        (described,) = admin.describe_topics([f"three.{TOPIC}"])
        return described["partitions"][0]["leader_id"]
    finally:
        admin.close()


@pytest.mark.slow
def test_one_of_three_dies_unnoticed_two_stop_writes_and_nothing_is_lost(
    brokers: dict[int, KafkaBroker],
) -> None:
    servers = ",".join(broker.server for broker in brokers.values())
    url = f"kafka://{servers}/three?replication=3&min_isr=2"
    with Writing(url) as writing:
        acknowledged = writing.acknowledged
        wait_for(lambda: len(acknowledged) > 100)
        first = leader(servers)
        brokers[first].kill()
        before = len(acknowledged)
        wait_for(lambda: len(acknowledged) > before + 100)
        second = next(n for n in brokers if n not in (first, leader(servers)))
        brokers[second].kill()  # the present leader lives and has no broker to copy to
        let_pass(SETTLE_S)
        before = len(acknowledged)
        let_pass(QUIET_S)
        assert len(acknowledged) == before, "acknowledged by less than two"
        for node in (first, second):
            brokers[node].start()
        for node in (first, second):
            brokers[node].wait_ready()
        wait_for(lambda: len(acknowledged) > before + 100)
    assert len(acknowledged) == len(set(acknowledged))
    bus = open_bus(url)
    there = found(bus)
    bus.close()
    assert set(acknowledged) <= set(there)
    assert set(there.values()) == {1}
    assert sorted(there) == list(range(max(there) + 1))
    print(f"{len(acknowledged)} acknowledged, {writing.terms} terms")
