"""Defines the catalogue of topics: their names, retention and numbers of partitions.

`safe` topics are truncated only below the oldest record that an open group, a kept checkpoint,
dispatch's rebuild or the archive needs, never by time. `compact` topics keep the newest record per
key. `dead` is kept by time.
"""

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

DEAD = "dead"
"""The topic of the unreadable records of all topics. Runs of 0.1.0 have a `<topic>.dead` for each
topic.
"""
DEAD_RETENTION_S = 7 * 24 * 3600.0
KEY_BYTES_MAX = 1 << 16  # of a key; the claim check depends on the value's size alone
DEAD_BYTES_EXTRA = 1 << 16  # added to the original bytes by a `Dead`: address, reason, header
TOMBSTONE_S = 24 * 3600.0  # how long a tombstone stays for readers that are behind
DEAD_BYTES_MAX = (16 << 20) + DEAD_BYTES_EXTRA
RECORD_BYTES_MAX = 1 << 20
"""Larger records go to the object store (claim check); compacted topics refuse them."""
NUMBER_MAX = 1e6
"""Bound of rewards, scores and annotation values. A gradient norm squares sums over tokens: (1e6 ·
2 · 1e6 tokens)² = 4e24 is far below the largest float32, 3e38. It is defined here because a query
needs it before NumPy is imported.
"""


@dataclass(frozen=True, slots=True)
class Topic:
    """Names one topic and its limits. Without `retention_s` records stay until they are
    truncated.
    """

    name: str
    partitions: int = 1
    cleanup: Literal["safe", "compact", "time"] = "safe"
    retention_s: float | None = None
    record_bytes_max: int = 16 << 20
    writer: str = ""
    """The single-holder role that writes the topic; "" if it has many writers (invariant 7)."""


ARCHIVED_TOPICS = ("trajectories", "annotations", "ledger", "admissions", "applied")
"""Topics that the archive keeps; the views of `rollstream query` have these names."""


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a key, the same for every back end and language: CRC-32 (IEEE) modulo
    the number of partitions.
    """
    return crc32(key) % partitions


def is_in_key_partition(group: int, partition: int, partitions: int) -> bool:
    """Return whether a record of this group is in the partition of its key. A record in another
    partition has no place in the order of its group, so the first completion would depend on the
    order in which a reader takes the partitions (invariant 2).
    """
    return 0 <= group < 1 << 63 and partition_of(str(group).encode(), partitions) == partition


def catalogue(spread: int = 4) -> tuple[Topic, ...]:
    """Return all topics of a run. `spread` is the number of partitions of topics that many
    processes share.
    """
    return (
        Topic("prompts", writer="prompts"),
        Topic("admissions", writer="dispatch"),
        Topic("assignments", spread, writer="dispatch"),
        Topic("partials", spread),
        Topic("status", cleanup="compact", record_bytes_max=RECORD_BYTES_MAX),
        Topic("trajectories", spread),
        Topic("annotations", spread),
        Topic("weights", cleanup="compact", record_bytes_max=RECORD_BYTES_MAX, writer="trainer"),
        Topic("applied"),
        Topic("ledger", writer="trainer"),
        Topic(DEAD, 1, "time", DEAD_RETENTION_S, DEAD_BYTES_MAX),
    )


def is_dead_letter_topic(topic: str) -> bool:
    """Return whether the topic holds dead letters: of all topics, or of one in a run of 0.1.0."""
    source, dot, last = topic.rpartition(".")
    return last == DEAD and (not dot or source in _NAMES)


_NAMES = frozenset(topic.name for topic in catalogue())
