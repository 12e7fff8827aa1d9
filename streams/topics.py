"""All topics of a run.

A `safe` topic is truncated only below the oldest record that an open group, a kept checkpoint,
dispatch's rebuild or the archive needs, never by time. A `compact` topic keeps the newest record of
each key. The topic `dead` is kept by `time`.
"""

import re
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

DEAD = "dead"
"""Runs of release 0.1.0 have one topic `<topic>.dead` for each topic instead."""
DEAD_RETENTION_S = 7 * 24 * 3600.0
KEY_BYTES_MAX = 1 << 16  # room for a key beside a value that is just too small for a claim check
DEAD_BYTES_EXTRA = 1 << 16  # what a `Dead` has beside the original bytes: address, reason, header
# How long a tombstone (which deletes its key) stays in a compacted topic for slow readers.
TOMBSTONE_S = 24 * 3600.0
DEAD_BYTES_MAX = (16 << 20) + DEAD_BYTES_EXTRA
RECORD_BYTES_MAX = 1 << 20
"""Larger records go to the object store (claim check); a compacted topic refuses them."""
NUMBER_MAX = 1e6
"""Bounds rewards, scores and annotation values. An advantage is then at most 2e6, and a gradient
norm squares sums of them over tokens: (2e6 · 1e6 tokens)² = 4e24 is far below the largest float32,
3e38.
"""


@dataclass(frozen=True, slots=True)
class Topic:
    """`record_bytes_max` counts a record's key and value. Without `retention_s` no record is
    removed by its age.
    """

    name: str
    partitions: int = 1
    cleanup: Literal["safe", "compact", "time"] = "safe"
    retention_s: float | None = None
    record_bytes_max: int = 16 << 20
    writer: str = ""
    """The single-holder role that writes the topic; "" if it has many writers (invariant 7)."""


ARCHIVED_TOPICS = ("trajectories", "annotations", "ledger", "admissions", "applied")
"""The archive keeps them; `rollstream query` has a view of the same name for each."""


STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
"""Names of weight streams (`storage/weights/named_streams.py`)."""
_STREAM_TOPIC = "weight-stream-"  # without a dot, so it is no topic of a run with a longer prefix


def announcement_topic(stream: str = "") -> Topic:
    """Returns `weights` for the policy's versions, and a topic of its own for each named stream."""
    name, writer = (_STREAM_TOPIC + stream, "streams") if stream else ("weights", "trainer")
    return Topic(name, cleanup="compact", record_bytes_max=RECORD_BYTES_MAX, writer=writer)


def run_topic(name: str) -> Topic | None:
    """Returns the topic of the catalogue or of a named weight stream; None for another name."""
    stream = name.removeprefix(_STREAM_TOPIC)
    if stream != name and STREAM_NAME.fullmatch(stream):
        return announcement_topic(stream)
    return _CATALOGUE.get(name)


def partition_of(key: bytes, partitions: int) -> int:
    """Returns the key's CRC-32 (IEEE) modulo `partitions`, in every back end and for programs in
    any language.
    """
    return crc32(key) % partitions


def is_in_key_partition(group: int, partition: int, partitions: int) -> bool:
    """Whether the group's key belongs to `partition`. A group's record in another partition must be
    ignored: the order between partitions differs from reader to reader, so readers would disagree
    about the first completion (invariant 2).
    """
    return 0 <= group < 1 << 63 and partition_of(str(group).encode(), partitions) == partition


def catalogue(spread: int = 4) -> tuple[Topic, ...]:
    """`spread` is the number of partitions of topics that many processes share."""
    return (
        Topic("prompts", writer="prompts"),
        Topic("admissions", writer="dispatch"),
        Topic("assignments", spread, writer="dispatch"),
        Topic("partials", spread),
        Topic("status", cleanup="compact", record_bytes_max=RECORD_BYTES_MAX),
        Topic("trajectories", spread),
        Topic("annotations", spread),
        announcement_topic(),
        Topic("applied"),
        Topic("ledger", writer="trainer"),
        Topic(DEAD, 1, "time", DEAD_RETENTION_S, DEAD_BYTES_MAX),
    )


def is_dead_letter_topic(topic: str) -> bool:
    """Returns whether it has the dead letters of all topics, or of one in a run of 0.1.0."""
    source, dot, last = topic.rpartition(".")
    return last == DEAD and (not dot or source in _CATALOGUE)


_CATALOGUE = {topic.name: topic for topic in catalogue()}
