"""A `Topic` as the settings of a broker's topic, and back: pure functions.

Everything but `writer` is recovered from the broker: the size limit from `max.message.bytes`, which
is the record's limit plus room for a whole batch. The writer comes from the catalogue, or from what
this process created the topic with.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from streams.errors import BusError
from streams.topics import TOMBSTONE_S, Topic, catalogue

BATCH_ROOM_BYTES = (1 << 20) + (1 << 12)  # a batch of small records, and what frames one large one
RECORD_BYTES_LIMIT = 64 << 20  # brokers take requests of 100 MiB (`socket.request.max.bytes`)
WRITERS = {topic.name: topic.writer for topic in catalogue()}
KEPT_FOR_EVER = {"retention.ms": "-1", "retention.bytes": "-1"}
SEGMENT_BYTES = 128 << 20  # a truncation frees whole segments


def configs_of(topic: Topic, min_isr: int = 0) -> dict[str, str]:
    """The broker's settings that make the topic keep what it promises, none left to a default."""
    if (topic.cleanup == "time") != (topic.retention_s is not None):
        raise BusError(
            f"topic {topic.name!r}: on Kafka retention_s goes with cleanup 'time' and no other, "
            f"got {topic.cleanup!r} with {topic.retention_s}"
        )
    if topic.record_bytes_max > RECORD_BYTES_LIMIT:
        raise BusError(
            f"topic {topic.name!r}: record_bytes_max must be ≤ {RECORD_BYTES_LIMIT} on Kafka, got "
            f"{topic.record_bytes_max}; larger records go to the object store"
        )
    configs = {
        "cleanup.policy": "compact" if topic.cleanup == "compact" else "delete",
        "max.message.bytes": str(topic.record_bytes_max + BATCH_ROOM_BYTES),
        "message.timestamp.type": "CreateTime",
        **KEPT_FOR_EVER,
    }
    if topic.cleanup == "compact":
        configs |= {
            "segment.ms": str(600_000),  # the segment written to is never compacted
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": str(int(TOMBSTONE_S * 1000)),
        }
    else:
        configs["segment.bytes"] = str(SEGMENT_BYTES)
    if topic.retention_s is not None:
        configs["retention.ms"] = str(round(topic.retention_s * 1000))
    if min_isr:
        configs["min.insync.replicas"] = str(min_isr)
    return configs


def topic_of(name: str, partitions: int, configs: Mapping[str, str]) -> Topic:
    """The topic that a broker has, whoever created it; `Topic` must equal ours to be used."""
    policy, retention_ms = configs["cleanup.policy"], int(configs["retention.ms"])
    timed = policy == "delete" and retention_ms >= 0
    return Topic(
        name,
        partitions,
        cast(Any, {"delete": "time" if timed else "safe"}.get(policy, policy)),
        retention_ms / 1000 if timed else None,
        int(configs["max.message.bytes"]) - BATCH_ROOM_BYTES,
        WRITERS.get(name, ""),
    )


def check_unbounded(topic: Topic, configs: Mapping[str, str]) -> None:
    """`BusError` where the broker would forget records by size, or stamps them itself."""
    wanted = {"retention.bytes": "-1", "message.timestamp.type": "CreateTime"}
    for name, value in wanted.items():
        if configs[name] != value:
            raise BusError(
                f"topic {topic.name!r} exists with other settings: {name} is {configs[name]!r}, "
                f"needed is {value!r}; change it on the broker or use another prefix of topics"
            )


def with_writer(topic: Topic, writer: str) -> Topic:
    return dataclasses.replace(topic, writer=writer)
