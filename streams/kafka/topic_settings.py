"""Maps a `Topic` to a Kafka topic's settings and back. A key must keep its partition, so partitions
that an administrator adds stay empty and are not read.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollstream.errors import BusError
from rollstream.streams.kafka.refusals import TIME_LIMITS, UNLIMITED_MS, lift_time_limits
from rollstream.streams.topics import KEY_BYTES_MAX, TOMBSTONE_S, Topic, run_topic

BATCH_ROOM_BYTES = (1 << 20) - KEY_BYTES_MAX
"""`max.message.bytes` is the record limit plus this room, for a batch of small records or the parts
of a request around one large record. With an object store the largest record has 1 MiB and
`KEY_BYTES_MAX` (claim check), so the sum is the 2 MiB that managed services allow.
"""
RECORD_BYTES_LIMIT = 64 << 20  # brokers take requests of 100 MiB (`socket.request.max.bytes`)
UNLIMITED_RETENTION = {"retention.ms": "-1", "retention.bytes": "-1"}
CLOCK_S = 7 * 24 * 3600.0  # a clock that is wrong for longer is noticed by TLS, too
SEGMENT_BYTES = 128 << 20  # a truncation frees whole segments


@dataclass(frozen=True, slots=True)
class BrokerTopic:
    """`copies` is that of the least replicated partition. `clock_s` is how far the time of a record
    may differ from the broker's clock (`TIME_LIMITS`).
    """

    topic: Topic
    copies: int
    min_isr: int
    clock_s: float = UNLIMITED_MS / 1000


def configs_of(topic: Topic, min_isr: int = 0) -> dict[str, str]:
    """Returns the topic's settings; only `min.insync.replicas` is left to the broker's default, if
    `min_isr` is 0. Raises `BusError` for a topic that Kafka cannot hold.
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
        # No decision compares two clocks, so a wrong one is no reason to refuse a record: brokers
        # of Kafka 4 refuse those of an hour ahead by default.
        **dict.fromkeys(TIME_LIMITS, str(UNLIMITED_MS)),
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
    """Returns the topic, which any program may have created (`check_same_settings`)."""
    policy, retention_ms = configs["cleanup.policy"], int(configs["retention.ms"])
    timed = policy == "delete" and retention_ms >= 0
    own = run_topic(name)
    return Topic(
        name,
        partitions,
        cast(Any, {"delete": "time" if timed else "safe"}.get(policy, policy)),
        retention_ms / 1000 if timed else None,
        int(configs["max.message.bytes"]) - BATCH_ROOM_BYTES,
        own.writer if own else "",
    )


def check_unbounded(topic: Topic, configs: Mapping[str, str]) -> None:
    """Raise `BusError` if the broker would delete records by size, or replace timestamps."""
    required = {"retention.bytes": "-1", "message.timestamp.type": "CreateTime"}
    for name, value in required.items():
        if configs[name] != value:
            raise BusError(
                f"topic {topic.name!r} exists with other settings: {name} is {configs[name]!r}, "
                f"{value!r} is required; change it on the broker or use another topic prefix"
            )


def with_recorded_partitions(topic: Topic, partitions: int | None = None) -> Topic:
    """Returns the topic with the partitions that keys are spread over since the run's start; None:
    the catalogue's number.
    """
    if partitions is None:
        partitions = (run_topic(topic.name) or topic).partitions
    # If the broker has fewer, `check_same_settings` refuses the topic.
    return dataclasses.replace(topic, partitions=min(partitions, topic.partitions))


def clock_s_of(configs: Mapping[str, str]) -> float:
    # Brokers before Kafka 3.6 lack both settings and have no limit by default.
    return min(int(configs.get(name) or UNLIMITED_MS) for name in TIME_LIMITS) / 1000


def clock_bound_topics(topics: Mapping[str, BrokerTopic], on_cluster: Mapping[str, str]) -> str:
    """Returns a warning about topics that refuse records of a clock that differs by less than a
    week. `on_cluster` has their names on the cluster.
    """
    bound = [name for name, topic in topics.items() if topic.clock_s < CLOCK_S]
    if not bound:
        return ""
    limit_s = min(topics[name].clock_s for name in bound)
    return (
        f"{len(bound)} of {len(topics)} topics refuse records whose time differs from the broker's "
        f"clock by more than {limit_s:g} s: a machine with a wrong clock cannot write; for each of "
        f"them: {lift_time_limits(on_cluster[bound[0]])}"
    )


def unreplicated_topics(topics: Mapping[str, BrokerTopic], brokers: int) -> str:
    """Returns a warning about topics that have, or acknowledge after, one replica; "" if there is
    only one broker.
    """
    single = {
        "replication factor": [name for name, topic in topics.items() if topic.copies == 1],
        "min.insync.replicas": [name for name, topic in topics.items() if topic.min_isr == 1],
    }
    lacking = [
        f"{what} is 1 for {len(names)} of {len(topics)} topics ({names[0]}, …)"
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
