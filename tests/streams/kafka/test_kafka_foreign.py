"""A foreign client on a topic of ours: kcat (librdkafka), or Kafka's own console tools."""

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import decode, encode
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Trajectory
from rollstream.streams.topics import Topic
from testbed.sample_records import trajectory
from testbed.servers import use
from testbed.servers.kafka_broker import SHORT_LIVED, jars, new_url, server
from testbed.waiting import WAIT_S


@pytest.fixture
def url() -> str:
    return new_url()


@pytest.fixture
def bus(url: str) -> Iterator[Bus]:
    opened = open_bus(url)
    opened.create([Topic("t")])
    yield opened
    opened.close()


def run(command: list[str], given: bytes = b"") -> bytes:
    done = subprocess.run(command, input=given, capture_output=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def java(tool: str, *arguments: str) -> list[str]:
    main = f"org.apache.kafka.tools.{tool}"
    servers = ["--bootstrap-server", server()]
    return ["java", *SHORT_LIVED, "-cp", f"{jars()}/*", main, *servers, *arguments]


def test_a_foreign_client_writes_what_we_read(bus: Bus, url: str) -> None:
    topic = f"{url.rpartition('/')[2]}.t"
    if shutil.which("kcat"):
        use("kcat", "librdkafka as a foreign client")
        command = ["kcat", "-b", server(), "-t", topic, "-P", "-K", ":"]
    else:
        use("Kafka's console tools", "as a foreign client")
        options = ["parse.key=true", "key.separator=:"]
        command = java("ConsoleProducer", "--topic", topic)
        command += [word for option in options for word in ("--reader-property", option)]
    run(command, b"alpha:one\nbeta:two\n")
    read = bus.read("t", {0: 0}, wait_s=WAIT_S)
    assert [(m.key, m.value) for m in read] == [(b"alpha", b"one"), (b"beta", b"two")]


def test_a_foreign_client_reads_what_we_wrote(bus: Bus, url: str) -> None:
    topic = f"{url.rpartition('/')[2]}.t"
    bus.append("t", [AppendEntry(b"alpha", b"one"), AppendEntry(b"beta", b"two")])
    if shutil.which("kcat"):
        output = run(["kcat", "-b", server(), "-t", topic, "-C", "-e", "-q", "-J"])
        rows = [json.loads(line) for line in output.splitlines()]
        read = [(row["offset"], row["key"], row["payload"]) for row in rows]
    else:
        bounds = [
            "--from-beginning",
            "--max-messages",
            "2",
            "--formatter-property",
            "print.key=true",
        ]
        output = run(java("consumer.ConsoleConsumer", "--topic", topic, *bounds))
        lines = [line.decode().split("\t") for line in output.splitlines()]
        read = [(n, key, value) for n, (key, value) in enumerate(lines)]
    assert read == [(0, "alpha", "one"), (1, "beta", "two")]


def test_the_bytes_of_a_record_are_the_same_for_a_foreign_client(bus: Bus, url: str) -> None:
    topic = f"{url.rpartition('/')[2]}.t"
    data = encode(trajectory(20))
    bus.append("t", [AppendEntry(b"7", data)])
    if shutil.which("kcat"):
        options = ["-C", "-e", "-q", "-D", "", "-f", "%s"]
        output = run(["kcat", "-b", server(), "-t", topic, *options])
    else:
        bounds = ["--from-beginning", "--max-messages", "1"]
        output = run(java("consumer.ConsoleConsumer", "--topic", topic, *bounds)).removesuffix(
            b"\n"
        )
    assert output == data
    assert isinstance(decode(output).record, Trajectory)
