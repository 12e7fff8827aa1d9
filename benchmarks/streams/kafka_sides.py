"""The processes that `benchmarks.streams.kafka` times, each by itself like the tools that it is
compared with: `python -m benchmarks.streams.kafka_sides produce|consume|encode|decode|stopped URL
TOPIC COUNT`. Payloads are made before the clock starts; the seconds, or the other measurement, are
the last line of the output.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from operator import attrgetter

import numpy as np
import psutil

from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import decode, encode
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Span, Version

RECORD_BYTES = 50_000
BATCH = 128  # records of one append
READ = 512  # records of one read at most
TOKENS = 6_100  # of a trajectory of RECORD_BYTES
STOPPED_THREADS, STOPPED_S = 96, 8.0
PAGES_MB = 1e6

fields_of = attrgetter(*Trajectory.__struct_fields__)


def produce(bus: Bus, topic: str, count: int) -> float:
    value, partitions = bytes(RECORD_BYTES), bus.partitions(topic)
    batch = [AppendEntry(b"k", value, number % partitions) for number in range(BATCH)]
    bus.append(topic, batch[:1])  # creates the client before the clock starts, as the tool does
    return _timed(lambda: [bus.append(topic, batch[:n]) for n in _batches(count)])


def encode_and_produce(bus: Bus, topic: str, count: int) -> float:
    records, partitions = [_trajectory(seed) for seed in range(BATCH)], bus.partitions(topic)
    bus.append(topic, [AppendEntry(b"k", encode(records[0]), 0)])

    def work() -> None:
        for size in _batches(count):
            bus.append(
                topic,
                [
                    AppendEntry(b"k", encode(r), n % partitions)
                    for n, r in enumerate(records[:size])
                ],
            )

    return _timed(work)


def consume(bus: Bus, topic: str, count: int, each: Callable[[bytes], object] = len) -> float:
    positions, left = dict.fromkeys(range(bus.partitions(topic)), 0), count
    bus.read(topic, bus.end(topic))  # creates the client, fetches nothing

    def work() -> None:
        nonlocal left
        while left > 0:
            messages = bus.read(topic, positions, records_max=READ, bytes_max=64 << 20, wait_s=10)
            assert messages, f"{left} of {count} records are missing"
            for message in messages:
                each(message.value or b"")
                positions[message.partition] = message.offset + 1
            left -= len(messages)

    return _timed(work)


def consume_and_decode(bus: Bus, topic: str, count: int) -> float:
    return consume(bus, topic, count, lambda value: fields_of(decode(value).record))


def stopped(bus: Bus, topic: str, bound: int) -> float:
    """MB by which this process grew while the broker was stopped, with more records offered than
    the bound. The caller stops the broker when the first line is printed.
    """
    bus.append(topic, [AppendEntry(b"k", bytes(1 << 20), 0)])
    value = os.urandom(1 << 20)
    assert STOPPED_THREADS * len(value) > bound
    print("ready", flush=True)
    sys.stdin.readline()
    before = peak = psutil.Process().memory_info().rss
    for _ in range(STOPPED_THREADS):
        work = threading.Thread(target=lambda: bus.append(topic, [AppendEntry(b"k", value, 0)]))
        work.daemon = True
        work.start()
    end = time.monotonic() + STOPPED_S
    while time.monotonic() < end:
        peak = max(peak, psutil.Process().memory_info().rss)
        time.sleep(0.02)
    return (peak - before) / PAGES_MB


SIDES: dict[str, Callable[[Bus, str, int], float]] = {
    "produce": produce,
    "consume": consume,
    "encode": encode_and_produce,
    "decode": consume_and_decode,
    "stopped": stopped,
}


def _batches(count: int) -> Iterator[int]:
    for start in range(0, count, BATCH):
        yield min(BATCH, count - start)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _trajectory(seed: int) -> Trajectory:
    random = np.random.default_rng(seed)
    sources = np.repeat(np.array([0, 1], np.uint8), [100, TOKENS - 100])
    return Trajectory(
        trajectory=f"g{seed:08d}.03",
        group=seed,
        index=3,
        attempt=1,
        task="remainder",
        rollout="rollout-0",
        rollout_term=4,
        tokens=random.integers(0, 150_000, TOKENS, dtype=np.uint32),
        sources=sources,
        logprobs=-random.random(TOKENS - 100, dtype=np.float32),
        spans=(Span(0, TOKENS - 100, Version(41, 1)),),
        finish="stop",
        reward=1.0,
        trainer_version=Version(43, 1),
        started_s=1_763_700_000.125,
        finished_s=1_763_700_003.75,
        wave=3,
    )


if __name__ == "__main__":
    side, url, topic, count = sys.argv[1:]
    bus = open_bus(url)
    print(SIDES[side](bus, topic, int(count)), flush=True)
    os._exit(0)  # threads may still wait for a stopped broker
