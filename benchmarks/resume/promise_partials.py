"""The cost of partials in bytes: bytes written to `partials` per byte of the trajectory's own
record, at 16 384 generated tokens.

It uses the rollout's own path (`RunningTrajectory`, `RolloutPublisher`, `BackgroundSender`, the
codec, a SQLite bus). Only the engine is simulated: a token of each trajectory a poll, under a
version that changes every 4 096 tokens. A partial is durable before the next token comes, so none
is longer than `partial_tokens`: the most bytes that the default can cost. A rollout whose log is
slower writes fewer and longer ones.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.case import Case, alone
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.sender import BackgroundSender
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.bus import Bus, Message
from rollstream.streams.records import Assignment
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Tokens, Version

TOKENS, QUICK_TOKENS, PROMPT = 16_384, 4096, 256
VERSION_TOKENS = 4096  # tokens between two versions
TOKENS_PER_S = 40.0  # of one trajectory: 64 tokens come before 2 s have passed
RUNNING = 4
AMPLIFICATION_MAX = 1.5


def cases(quick: bool) -> Iterator[Case]:
    """Bytes of appended records and their keys."""
    tokens = QUICK_TOKENS if quick else TOKENS
    with tempfile.TemporaryDirectory(prefix="rollstream-partials-") as folder:
        bus = SqliteBus(Path(folder) / "bus")
        bus.create(catalogue())
        _roll_out(bus, tokens)
        partials, trajectories = (_messages(bus, topic) for topic in ("partials", "trajectories"))
        bus.close()
    ours, theirs = sum(map(_size, partials)), sum(map(_size, trajectories))
    count = len(partials) / RUNNING
    note = (
        f"{tokens:,} tokens in {count:.0f} partials of {ours / len(partials):,.0f} bytes, "
        f"a trajectory of {theirs / RUNNING:,.0f}"
    )
    yield alone("partials_amplification", ours / theirs, "", at_most=AMPLIFICATION_MAX, note=note)


def _roll_out(bus: Bus, tokens: int) -> None:
    """Runs several trajectories in parallel, a token of each at a time, to their ends."""
    now = [0.0]
    outbox, settings = BackgroundSender(bus), RolloutSettings()
    publisher = RolloutPublisher(
        bus, outbox, "rollout-0", 3, settings, StatusSchedule(1.0), clock=lambda: now[0]
    )
    running = [RunningTrajectory.start(_assignment(index), None, 0.0) for index in range(RUNNING)]
    random = np.random.default_rng(0)
    drawn = random.integers(0, 150_000, (tokens, RUNNING, 1), np.uint32)
    logprobs = -random.random((tokens, RUNNING, 1), np.float32)
    for at in range(tokens):
        now[0] += 1 / TOKENS_PER_S
        version = Version(41 + at // VERSION_TOKENS, 1)
        for index, one in enumerate(running):
            name = one.assignment.trajectory
            one.extend(Emission(name, drawn[at, index], logprobs[at, index], version, None))
        publisher.partials(running)
        if any(one.flushing for one in running):
            outbox.flush()
    publisher.trajectories(
        [one.to_record(3, "length", now[0], Version(45, 1), 1.0) for one in running]
    )
    outbox.flush()


def _assignment(index: int) -> Assignment:
    prompt: Tokens = np.arange(PROMPT, dtype=np.uint32)
    name, version = f"1234.{index}", Version(41, 1)
    sampling = Sampling(tokens_max=TOKENS)
    return Assignment(
        "start", name, 1234, index, 1, "rollout-0", 3, version, "countdown", prompt, sampling, 7
    )


def _messages(bus: Bus, topic: str) -> list[Message]:
    found: list[Message] = []
    for partition, end in bus.end(topic).items():
        at = 0
        while at < end:
            read = bus.read(topic, {partition: at})
            found += read
            at = read[-1].offset + 1
    return found


def _size(message: Message) -> int:
    return len(message.key) + len(message.value or b"")
