"""A real broker killed, paused and filled: no acknowledged record is lost, clients continue."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress

import psutil
import pytest
from kafka.errors import for_code  # pyright: ignore[reportAttributeAccessIssue] (made by name)

from rollstream.errors import BusError, BusTimeout
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.connect import open_bus, open_bus_for_reading
from rollstream.streams.kafka import kind
from rollstream.streams.kafka.address import Secrets, parse_kafka_url
from rollstream.streams.kafka.admin import call_with_retries
from rollstream.streams.kafka.bus import KafkaBus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import GroupClosed
from rollstream.streams.topics import Topic, catalogue
from rollstream.streams.writer import FencedWriter
from testbed.servers.kafka_broker import KafkaBroker, new_url
from testbed.waiting import WAIT_S, let_pass, wait_for
from tests.streams.forked_child import check_that_a_forked_child_is_refused
from tests.streams.sqlite.test_sqlite_processes import start

APPEND = """
import sys
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import Topic
bus = open_bus(sys.argv[1])
bus.create([Topic("t", 2)])
for number in range(int(sys.argv[2])):
    entry = AppendEntry(b"k", b"%d" % number + bytes(3000), number % 2)
    print(number, *bus.append("t", [entry]), flush=True)
"""
MEMBER = """
import sys
from rollstream.streams.kafka.address import Secrets, parse_kafka_url
from rollstream.streams.kafka.bus import KafkaBus
bus = KafkaBus(parse_kafka_url(sys.argv[1]), Secrets(), lease_s=6.0)
reader = bus.join("g", "t", sys.argv[2])
while True:
    messages = reader.poll(0.5, records_max=7)
    for message in messages:
        print(message.partition, message.offset, flush=True)
    reader.commit()
"""


@pytest.fixture(scope="module")
def own_broker() -> Iterator[KafkaBroker]:
    started = KafkaBroker()
    started.start()
    started.wait_ready()
    yield started
    started.close()


@pytest.fixture
def broker(own_broker: KafkaBroker) -> Iterator[KafkaBroker]:
    """A broker that a test may kill or stop; it runs again afterwards."""
    yield own_broker
    own_broker.signal(signal.SIGCONT)


def numbers(bus: Bus) -> dict[int, list[int]]:
    """All of topic `t`, by partition."""
    positions, found = {0: 0, 1: 0}, {0: [], 1: []}
    while messages := bus.read("t", positions):
        for message in messages:
            found[message.partition].append(int((message.value or b"").rstrip(b"\0")))
            positions[message.partition] = message.offset + 1
    return found


def lines_until(process: subprocess.Popen[str], enough: Callable[[list[str]], bool]) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    too_long = threading.Timer(120, process.kill)
    too_long.start()
    while not enough(lines):
        line = process.stdout.readline()
        assert line, f"the process ended, or took too long, after {len(lines)} lines"
        lines.append(line)
    too_long.cancel()
    return lines


def test_a_broker_killed_and_restarted_loses_nothing_and_clients_continue(
    broker: KafkaBroker,
) -> None:
    url = f"kafka://{broker.server}"
    writer = start(APPEND, url, 600)
    lines_until(writer, lambda lines: len(lines) == 100)
    bus = open_bus(url)
    positions, read = {0: 0, 1: 0}, 0
    for _ in range(3):
        messages = bus.read("t", positions, records_max=5, wait_s=20)
        read += len(messages)
        positions |= {m.partition: m.offset + 1 for m in messages}
    broker.kill()
    restart = threading.Timer(2.0, broker.start)
    restart.start()
    while read < 600:
        messages = bus.read("t", positions, wait_s=60)
        assert messages, f"only {read} came"
        read += len(messages)
        positions |= {m.partition: m.offset + 1 for m in messages}
    restart.join()
    assert writer.wait(WAIT_S) == 0
    assert numbers(bus) == {0: list(range(0, 600, 2)), 1: list(range(1, 600, 2))}
    bus.close()


def test_a_killed_writer_loses_nothing_that_was_acknowledged() -> None:
    url = new_url()
    writer = start(APPEND, url, 1_000_000)
    lines = lines_until(writer, lambda lines: len(lines) == 40)
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.stdout is not None
    lines += writer.stdout.readlines()
    writer.wait(WAIT_S)
    acknowledged = [int(line.split()[0]) for line in lines if line.endswith("\n")]
    bus = open_bus(url)
    found = numbers(bus)
    assert sorted(found[0] + found[1])[: len(acknowledged)] == acknowledged
    bus.close()


def test_of_two_members_one_is_killed_and_nothing_is_lost() -> None:
    url, bus, is_killed = (made := new_url()), open_bus(made), threading.Event()
    bus.create([Topic("t", 4)])

    def append() -> None:
        """Until one was killed, however late it joins, and a hundred records more."""
        number, more = 0, 100
        while more:
            bus.append("t", [AppendEntry(b"k", b"%d" % number, number % 4)])
            number, more = number + 1, more - is_killed.is_set()
            let_pass(0.02)

    writer = threading.Thread(target=append)
    doomed, heir = start(MEMBER, url, "doomed"), start(MEMBER, url, "heir")
    writer.start()
    killed = lines_until(doomed, lambda lines: len(lines) >= 20)
    os.kill(doomed.pid, signal.SIGKILL)
    is_killed.set()
    writer.join()
    assert doomed.stdout is not None
    killed += [line for line in doomed.stdout if line.endswith("\n")]
    everything = {(p, o) for p, end in bus.end("t").items() for o in range(end)}

    def complete(lines: list[str]) -> bool:
        return {tuple(map(int, line.split())) for line in (*killed, *lines)} == everything

    read = lines_until(heir, complete)
    assert len(read) < len(everything), "the heir read everything again"
    heir.kill()
    assert (doomed.wait(WAIT_S), heir.wait(WAIT_S)) == (-9, -9)
    bus.close()


FENCED = (
    "error_code=38, error_message='Unable to replicate the partition 1 time(s): All brokers are "
    "currently fenced, or have all their log directories cordoned.'"
)
"""What Kafka 4.3 answers to a new topic at some moments after its only broker was stopped for
longer than its session (2 of 5 stops)."""


@pytest.mark.parametrize(
    ("text", "tries"), [(FENCED, 2), ("because only 1 broker(s) are registered", 1)]
)
def test_a_topic_waits_for_brokers_that_start_but_not_for_copies_that_cannot_be(
    text: str, tries: int
) -> None:
    answers = iter([for_code(38)(text), None])
    asked: list[object] = []

    def once() -> None:
        asked.append(answer := next(answers))
        if answer is not None:
            raise answer

    with pytest.raises(BusError, match="refuses it") if tries == 1 else nullcontext():
        call_with_retries("create topics", WAIT_S, once, lambda error: None)
    assert len(asked) == tries


def test_a_producer_before_a_stopped_broker_stays_within_its_bound(broker: KafkaBroker) -> None:
    bound = 24 << 20
    bus = open_bus(f"kafka://{broker.server}/x?in_flight_bytes={bound}")
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", bytes(1 << 20))])
    broker.signal(signal.SIGSTOP)
    before = psutil.Process().memory_info().rss
    value, acknowledged = os.urandom(1 << 20), []
    threads = [
        threading.Thread(
            target=lambda: acknowledged.append(bus.append("t", [AppendEntry(b"k", value)]))
        )
        for _ in range(60)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: in_flight(bus) > bound - 2 * len(value))  # no further record fits
    assert psutil.Process().memory_info().rss - before < bound + (8 << 20)
    assert acknowledged == []
    broker.signal(signal.SIGCONT)
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(offset for offsets in acknowledged for offset in offsets) == list(range(1, 61))
    bus.close()


def in_flight(bus: Bus) -> int:
    """Bytes given to the producer and not yet acknowledged."""
    assert isinstance(bus, KafkaBus)
    return bus._appender._bound.taken


def test_a_full_producer_raises_at_once_where_it_is_set_to(broker: KafkaBroker) -> None:
    bus = open_bus(f"kafka://{broker.server}/full?in_flight_bytes={3 << 20}&when_full=raise")
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"first")])
    broker.signal(signal.SIGSTOP)
    waits = threading.Thread(target=lambda: bus.append("t", [AppendEntry(b"k", bytes(1 << 20))]))
    waits.start()
    wait_for(lambda: in_flight(bus))
    with pytest.raises(BusTimeout, match=r"in_flight_bytes.*nothing was sent"):
        bus.append("t", [AppendEntry(b"k", bytes(1 << 20))])
    broker.signal(signal.SIGCONT)
    waits.join(WAIT_S)
    assert bus.end("t") == {0: 2}
    bus.close()


def test_an_append_in_doubt_is_recognised_when_its_writer_sends_it_again(
    broker: KafkaBroker,
) -> None:
    bus = KafkaBus(parse_kafka_url(f"kafka://{broker.server}/doubt"), Secrets())
    bus.create(catalogue())
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    producer = bus._appender._producer
    assert producer is not None
    broker.signal(signal.SIGSTOP)
    batch = [("run", GroupClosed(group, "expired", "x" * 900_000, 1)) for group in range(6)]
    working = threading.Thread(target=lambda: writer.append(batch))
    working.start()
    wait_for(lambda: in_flight(bus))  # the first of them is being sent, the others wait behind it
    producer.abort()
    let_pass(0.5)
    broker.signal(signal.SIGCONT)
    working.join(WAIT_S)
    writer.append([("run", GroupClosed(6, "expired", "", 1))])
    reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
    records = [received.record for received in reader.read_to(bus.end("ledger"))]
    assert [r.group for r in records if isinstance(r, GroupClosed)] == list(range(7))
    bus.close()


def test_of_a_failed_append_nothing_is_sent_behind_what_failed(broker: KafkaBroker) -> None:
    bus = KafkaBus(parse_kafka_url(f"kafka://{broker.server}/prefix"), Secrets())
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"before")])
    broker.signal(signal.SIGSTOP)
    raised: list[BusError] = []

    def append() -> None:
        try:
            bus.append("t", [AppendEntry(b"k", b"%d" % n + bytes(900_000)) for n in range(6)])
        except BusError as error:
            raised.append(error)

    working = threading.Thread(target=append)
    working.start()
    wait_for(lambda: in_flight(bus))
    assert bus._appender._producer is not None
    bus._appender._producer.abort()
    working.join(WAIT_S)
    assert "is in doubt" in str(raised[0])
    broker.signal(signal.SIGCONT)
    bus.append("t", [AppendEntry(b"k", b"after")])
    messages = bus.read("t", {0: 0}, bytes_max=1 << 30, wait_s=10)
    values = [(m.value or b"").rstrip(b"\0") for m in messages]
    assert values in ([b"before", b"after"], [b"before", b"0", b"after"])
    bus.close()


def test_brokers_that_do_not_answer_are_named_within_the_time_given() -> None:
    bus = KafkaBus(parse_kafka_url("kafka://127.0.0.1:9"), Secrets(), answer_s=1.0)
    with pytest.raises(BusTimeout, match=r"kafka://127\.0\.0\.1:9.*check that the brokers run"):
        bus.end("t")
    bus.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_host_that_is_no_broker_is_named_soon(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections, and closes them or never answers."""
    monkeypatch.setattr(kind, "FIRST_ANSWER_S", 0.5)
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])
                    if closes:
                        accepted[-1].close()

        threading.Thread(target=accept, daemon=True).start()
        url = f"kafka://127.0.0.1:{listening.getsockname()[1]}/x"
        no_answer = pytest.raises(BusTimeout, match=rf"{url}.*no answer within 0\.5 s")
        with closing(open_bus_for_reading(url, None)) as bus, no_answer:
            bus.end("ledger")
    for each in accepted:
        each.close()


def test_a_forked_child_is_refused_with_what_to_do() -> None:
    check_that_a_forked_child_is_refused(open_bus(new_url()))
