"""Converts a `Topic` to the settings of a broker's topic and back, by pure functions.

All fields but `writer` can be recovered from the broker; the record limit follows from
`max.message.bytes`, which is that limit plus room for a whole batch. The writer comes from the
catalogue, or from this process if it created the topic. So does the number of partitions if the
broker has more: a key's partition must not change, so partitions that an administrator adds stay
empty and are not read.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollstream.errors import BusError
from rollstream.streams.topics import KEY_BYTES_MAX, TOMBSTONE_S, Topic, catalogue

BATCH_ROOM_BYTES = (1 << 20) - KEY_BYTES_MAX
"""Room for a batch of small records, or for the parts of a request around one large record. With
the largest record of a log with an object store this makes exactly the 2 MiB that managed services
allow.
"""
RECORD_BYTES_LIMIT = 64 << 20  # brokers take requests of 100 MiB (`socket.request.max.bytes`)
CATALOGUE = {topic.name: topic for topic in catalogue()}
UNLIMITED_RETENTION = {"retention.ms": "-1", "retention.bytes": "-1"}
SEGMENT_BYTES = 128 << 20  # a truncation frees whole segments


@dataclass(frozen=True, slots=True)
class BrokerTopic:
    """Describes a topic as the broker has it; `copies` is the number of replicas of its least
    replicated partition.
    """

    topic: Topic
    copies: int
    min_isr: int


def configs_of(topic: Topic, min_isr: int = 0) -> dict[str, str]:
    """Return the broker's settings that give the topic its guarantees; none is left to the broker's
    default.
    """
    if (topic.cleanup == "time") != (topic.retention_s is not None):
        raise BusError(
            f"topic {topic.name!r}: on Kafka retention_s requires cleanup 'time', and vice versa; "
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
        **UNLIMITED_RETENTION,
    }
    if topic.cleanup == "compact":
        configs |= {
            "segment.ms": str(600_000),  # the active segment is never compacted
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
    """Return the topic on a broker. Any program may have created it; it must equal ours to be
    used.
    """
    policy, retention_ms = configs["cleanup.policy"], int(configs["retention.ms"])
    timed = policy == "delete" and retention_ms >= 0
    return Topic(
        name,
        partitions,
        cast(Any, {"delete": "time" if timed else "safe"}.get(policy, policy)),
        retention_ms / 1000 if timed else None,
        int(configs["max.message.bytes"]) - BATCH_ROOM_BYTES,
        CATALOGUE[name].writer if name in CATALOGUE else "",
    )


def check_unbounded(topic: Topic, configs: Mapping[str, str]) -> None:
    """Raise `BusError` if the broker would delete records by size or set their timestamps
    itself.
    """
    wanted = {"retention.bytes": "-1", "message.timestamp.type": "CreateTime"}
    for name, value in wanted.items():
        if configs[name] != value:
            raise BusError(
                f"topic {topic.name!r} exists with other settings: {name} is {configs[name]!r}, "
                f"{value!r} is required; change it on the broker or use another topic prefix"
            )


def with_recorded_partitions(found: Topic, partitions: int | None = None) -> Topic:
    """Return the topic with the partitions that keys were spread over from the run's start:
    `partitions`, or the catalogue's. If the broker has fewer, the smaller number stays, and
    `check_same_settings` refuses it.
    """
    if partitions is None:
        partitions = (
            CATALOGUE[found.name].partitions if found.name in CATALOGUE else found.partitions
        )
    return dataclasses.replace(found, partitions=min(partitions, found.partitions))


def unreplicated_topics(found: Mapping[str, BrokerTopic], brokers: int) -> str:
    """Return a warning about topics with one replica, or whose records are acknowledged by one
    replica; "" if there are none or there is only one broker.
    """
    single = {
        "replication factor": [name for name, topic in found.items() if topic.copies == 1],
        "min.insync.replicas": [name for name, topic in found.items() if topic.min_isr == 1],
    }
    lacking = [
        f"{what} is 1 for {len(names)} of {len(found)} topics ({names[0]}, …)"
        for what, names in single.items()
        if names
    ]
    if not lacking or brokers < 2:
        return ""
    return (
        f"{'; '.join(lacking)}, on {brokers} brokers: the loss of one broker loses acknowledged "
        "records. Give replication=3&min_isr=2 in the bus URL before the topics are created, or "
        "change the topics (kafka-reassign-partitions, kafka-configs)"
    )
