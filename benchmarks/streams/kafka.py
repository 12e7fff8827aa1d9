"""The Kafka bus against the tools that measure kafka-python itself
(`kafka.benchmarks.producer_performance` and `consumer_performance`): same broker, same topic, same
50 KB records, each side in a process of its own and in turn. The tools get the batches and the
linger that suit this size best, and keep every record in memory; the bus waits for each append's
offsets and bounds the bytes in flight.
"""

import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial

from benchmarks.case import Case, alone, paired
from benchmarks.streams.kafka_sides import RECORD_BYTES
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import Topic
from testbed.servers.kafka_broker import KafkaBroker

PARTITIONS = 4
BOUND_MB = 64  # `in_flight_bytes` unless the URL sets another value
PRODUCER = "producer_performance", "batch_size=1048576", "linger_ms=5", "max_request_size=16777216"
CONSUMER = "consumer_performance", "max_partition_fetch_bytes=4194304"


def cases(quick: bool) -> Iterator[Case]:
    """Producing and consuming, with the codec on top, and memory beside a stopped broker."""
    pairs, count = (3, 2_000) if quick else (7, 4_000)
    broker = KafkaBroker(more="log.retention.check.interval.ms=600000\n")
    broker.start()
    broker.wait_ready()
    try:
        yield from _speeds(broker, pairs, count)
        yield _stopped(broker)
    finally:
        broker.close()


def _speeds(broker: KafkaBroker, pairs: int, count: int) -> Iterator[Case]:
    measured: dict[str, list[float]] = {}
    for pair in range(pairs + 1):
        for name, seconds in _pair(broker, count, pair):
            if pair:  # the first one warms the broker
                measured.setdefault(name, []).append(count / seconds)
    for what, reference, codec, goal in (
        ("produce", "producer_performance", "encode", 0.9),
        ("consume", "consumer_performance", "decode", 0.9),
    ):
        speeds = measured[what]
        megabytes = sorted(speeds)[len(speeds) // 2] * RECORD_BYTES / 1e6
        note = f"{megabytes:,.0f} MB/s, {RECORD_BYTES:,} bytes a record"
        unit = "records/s"
        yield paired(f"kafka_{what}", speeds, unit, reference, measured[reference], goal, note)
        note = f"the same with {codec}"
        yield paired(f"kafka_{what}_{codec}", measured[codec], unit, what, speeds, note=note)


def _pair(broker: KafkaBroker, count: int, pair: int) -> list[tuple[str, float]]:
    """Seconds by name; the order alternates from pair to pair."""
    bus = open_bus(f"kafka://{broker.server}")
    run = uuid.uuid4().hex[:8]
    topics = [f"{run}.{side}" for side in ("tool", "bus", "codec")]
    bus.create([Topic(topic, PARTITIONS) for topic in topics])
    tool, plain, codec = topics
    steps = [
        ("producer_performance", partial(_tool, broker, tool, count, *PRODUCER)),
        ("produce", partial(_side, broker, "produce", plain, count)),
        ("encode", partial(_side, broker, "encode", codec, count)),
        ("consumer_performance", partial(_tool, broker, tool, count, *CONSUMER)),
        ("consume", partial(_side, broker, "consume", plain, count)),
        ("decode", partial(_side, broker, "decode", codec, count)),
    ]
    turned = [*steps[:3][:: 1 if pair % 2 else -1], *steps[3:][:: 1 if pair % 2 else -1]]
    seconds = [(name, step()) for name, step in turned]
    for topic in topics:
        bus.truncate(topic, bus.end(topic))
    bus.close()
    return seconds


def _tool(broker: KafkaBroker, topic: str, count: int, name: str, *settings: str) -> float:
    command = [sys.executable, "-m", f"kafka.benchmarks.{name}", "-b", broker.server, "-t", topic]
    command += ["--num-records", str(count)]
    command += ["--record-size", str(RECORD_BYTES)] if name.startswith("producer") else []
    output = _output([*command, "-c", *settings])
    found = re.search(r"Execution time: ([\d.]+)", output)
    done = re.search(r"(\d+) suceeded, 0 failed|Consumed (\d+) records", output)
    if found is None or done is None or str(count) not in done.groups():
        raise RuntimeError(f"{name} did not do its work:\n{output}")
    return float(found.group(1))


def _side(broker: KafkaBroker, side: str, topic: str, count: int) -> float:
    url = f"kafka://{broker.server}"
    command = [sys.executable, "-m", "benchmarks.streams.kafka_sides", side, url, topic, str(count)]
    return float(_output(command).split()[-1])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _stopped(broker: KafkaBroker) -> Case:
    """The broker is stopped by a signal while a process appends more than its bound."""
    url = f"kafka://{broker.server}"
    bus = open_bus(url)
    topic = f"stopped.{uuid.uuid4().hex[:8]}"
    bus.create([Topic(topic)])
    bus.close()
    command = [sys.executable, "-m", "benchmarks.streams.kafka_sides", "stopped", url, topic]
    with subprocess.Popen(
        [*command, str(BOUND_MB << 20)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        broker.signal(signal.SIGSTOP)
        growth = float(process.communicate("\n")[0])
        broker.signal(signal.SIGCONT)
    note = f"96 threads with 1 MiB each before a stopped broker, in_flight_bytes={BOUND_MB} MiB"
    return alone("kafka_stopped_growth_mb", growth, "MB", at_most=BOUND_MB * 1.048576, note=note)
