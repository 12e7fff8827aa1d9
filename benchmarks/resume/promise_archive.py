"""The archive of a healthy run without a model: every trajectory of every step, its ledger and its
admissions, as the archive's own writer stores them.

All lengths are equal, so that reading time is known per trajectory; each trajectory has two spans,
as a run with in-flight updates has. Tokens repeat after some trajectories (generating them would
take longer than everything else); names, positions and hashes do not.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Message
from rollstream.streams.codec import Envelope, encode, record_hash
from rollstream.streams.records import Admitted, Fence, Opened, Record, StepDone, Take, Trajectory
from rollstream.streams.values import Address, GroupMembers, Member, Span, Version

RUN = "recorded"
SAMPLES, GROUPS, TAKES = 8, 8, 4  # samples of a group, groups of a step, …
PROMPT = 32  # tokens
PARTITIONS = 4
STARTED_MS = 1_763_700_000_000
DISTINCT = 128
MAX_LAG = 2


def record_run(store: ObjectStore, tokens: int, steps: int, partitions: int = PARTITIONS) -> int:
    """Archives a run of this many steps; returns the bytes of its trajectories in the log."""
    arrays = [_arrays(tokens, seed) for seed in range(DISTINCT)]
    places = [0] * partitions
    found: list[list[Message]] = [[] for _ in range(partitions)]
    ledger: list[Record] = [Opened("trainer", 1)]
    admissions: list[Record] = [Opened("dispatch", 1)]
    for step in range(1, steps + 1):
        begun: list[GroupMembers] = []
        for group in range((step - 1) * GROUPS, step * GROUPS):
            names = tuple(f"{group}.{index}" for index in range(SAMPLES))
            admissions.append(Admitted(group, step - 1, names, 600.0, Address(0, group)))
            members: list[Member] = []
            for index in range(SAMPLES):
                partition = group % partitions
                value = encode(_trajectory(group, index, step, arrays))
                at, places[partition] = places[partition], places[partition] + 1
                found[partition].append(_message("trajectories", partition, at, value, group))
                place = Address(partition, at)
                members.append(Member(names[index], place, record_hash(value)))
            begun.append(GroupMembers(group, tuple(members)))
        ledger += _step(step, begun, tokens)
    for partition, messages in enumerate(found):
        _write(store, "trajectories", partition, messages)
    for topic, role, records in (
        ("ledger", "trainer", ledger),
        ("admissions", "dispatch", admissions),
    ):
        values = [encode(record, Envelope(role, 1, at)) for at, record in enumerate(records)]
        messages = [_message(topic, 0, at, value, 0) for at, value in enumerate(values)]
        _write(store, topic, 0, messages)
    return sum(len(message.value or b"") for messages in found for message in messages)


def _step(step: int, begun: Sequence[GroupMembers], tokens: int) -> Iterator[Record]:
    each = len(begun) // TAKES
    for number in range(TAKES):
        groups = tuple(begun[number * each : (number + 1) * each])
        members = tuple(member for group in groups for member in group.members)
        yield Take(step, 0, number, members, groups)
    trained = len(begun) * SAMPLES
    counts = {"trained": trained, "groups": len(begun), "masked_tokens": 0}
    metrics = {"tokens_trained": float(trained * (tokens - PROMPT)), "lag_consumed_max": 1.0}
    version = Version(step, 1)
    yield StepDone(step, version, f"{step:032x}", TAKES, metrics, counts, STARTED_MS / 1000)


Arrays = tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.float32]]
"""Tokens, sources and log-probabilities of one completion."""


def _arrays(tokens: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    sources = np.repeat(np.array([0, 1], np.uint8), [PROMPT, tokens - PROMPT])
    drawn = random.integers(0, 150_000, tokens, dtype=np.uint32)
    return drawn, sources, -random.random(tokens - PROMPT, dtype=np.float32)


def _trajectory(group: int, index: int, step: int, arrays: Sequence[Arrays]) -> Trajectory:
    tokens, sources, logprobs = arrays[(group * SAMPLES + index) % len(arrays)]
    generated = len(logprobs)
    older, newer = Version(max(0, step - 2), 1), Version(step - 1, 1)
    half = generated // 2
    started = STARTED_MS / 1000 + group / 7
    return Trajectory(
        trajectory=f"{group}.{index}",
        group=group,
        index=index,
        attempt=1,
        task="countdown",
        rollout=f"rollout-{group % 3}",
        rollout_term=1,
        tokens=tokens,
        sources=sources,
        logprobs=logprobs,
        spans=(Span(0, half, older), Span(half, generated, newer)),
        finish="stop",
        reward=float(index % 2),
        trainer_version=newer,
        started_s=started,
        finished_s=started + 3.25 + index / 9,
        wave=step - 1,
        reference=f'{{"target": {group % 97}, "numbers": [3, 7, {group % 89}]}}',
    )


def _message(topic: str, partition: int, at: int, value: bytes, group: int) -> Message:
    return Message(topic, partition, at, STARTED_MS + at, b"%d" % group, value)


def _write(store: ObjectStore, topic: str, partition: int, messages: Sequence[Message]) -> None:
    key = archive_key(topic, RUN, partition, 0, messages[0].timestamp_ms)
    store.create(key, encode_file(topic, messages, Fence()).data)
