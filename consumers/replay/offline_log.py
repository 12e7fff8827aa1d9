"""Merges the trajectories of several sources into one log, as groups of a new run. Groups are
numbered in the order in which they first appear; each trajectory is written once, under the name of
its source.

The recorded versions are of other trainers, so all spans become version 0, which precedes all
training of the new run. After a kill, the same call over the same sources resumes.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from rollstream.consumers.replay.topic_copy import (
    ResumedTopicWriter,
    mark_begun,
    partition_batches,
    refuse_foreign_records,
)
from rollstream.errors import ConfigurationError, DecodeError
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.codec import decode, encode
from rollstream.streams.records import Annotation, Record, Trajectory
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Address, Span, Version

TOPICS = ("trajectories", "annotations")
START_VERSION = Version(0, 0)


@dataclass(frozen=True, slots=True)
class SourceTrajectory:
    """A trajectory of a source. `group` is the source's own name of its group, `at` its address if
    the source is a log.
    """

    group: str
    record: Trajectory
    timestamp_ms: int
    at: Address | None
    has_logprobs: bool = True


class TrajectorySource(Protocol):
    def trajectories(self) -> Iterator[SourceTrajectory]:
        """Yield the source's trajectories, in the same order at each call."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """A run's log or archive as a source; trajectories are ordered by completion time."""

    log: Bus
    counts: Counter[str] = field(default_factory=Counter[str])

    def trajectories(self) -> Iterator[SourceTrajectory]:
        """All completions; records that cannot be decoded are counted as `unreadable`."""
        for message, record in self._records("trajectories"):
            if isinstance(record, Trajectory):
                at = Address(message.partition, message.offset)
                yield SourceTrajectory(str(record.group), record, message.timestamp_ms, at)

    def annotations(self) -> Iterator[Annotation]:
        """All annotations."""
        for _, record in self._records("annotations"):
            if isinstance(record, Annotation):
                yield record

    def _records(self, topic: str) -> Iterator[tuple[Message, Record]]:
        ends = self.log.end(topic)
        by_partition = [
            self._partition(topic, partition, first, ends[partition])
            for partition, first in self.log.begin(topic).items()
        ]
        for message in heapq.merge(*by_partition, key=lambda m: (m.timestamp_ms, m.partition)):
            try:
                yield message, decode(message.value or b"").record
            except DecodeError:
                self.counts["unreadable"] += 1

    def _partition(self, topic: str, partition: int, first: int, end: int) -> Iterator[Message]:
        for messages in partition_batches(self.log, topic, partition, first, end):
            yield from messages


@dataclass(frozen=True, slots=True)
class LabelledSource:
    """A source, the label that prefixes its trajectories' names, and a filter."""

    label: str
    source: TrajectorySource
    keep: Callable[[SourceTrajectory], bool] = lambda draft: True


@dataclass(frozen=True, slots=True)
class GatherRules:
    """Trajectories outside `bounds` are left out. `fill` adds missing log-probabilities; the tokens
    of such a trajectory must be checked before (`check_tokens`).
    """

    bounds: TrainingBounds
    fill: Callable[[Trajectory], Trajectory]


def gather_sources(
    sources: Sequence[LabelledSource], log: Bus, rules: GatherRules, where: str
) -> Counter[str]:
    """Write the sources' trajectories and annotations into `log`; returns counts of those taken and
    left out.
    """
    refuse_foreign_records(log, TOPICS, where)
    for topic in TOPICS:
        mark_begun(log, topic)
    counts: Counter[str] = Counter()
    writers = {topic: ResumedTopicWriter(log, topic, where) for topic in TOPICS}
    for one in sources:
        groups = _put_trajectories(writers["trajectories"], one, rules, counts)
        if isinstance(one.source, RecordedSource):
            _put_annotations(writers["annotations"], one.source, one.label, groups)
            counts.update(one.source.counts)
    for writer in writers.values():
        writer.close()
    return counts


def _put_trajectories(
    writer: ResumedTopicWriter, one: LabelledSource, rules: GatherRules, counts: Counter[str]
) -> dict[str, int]:
    """Write one source's trajectories; returns the group of each, -1 for one that was left out. Of
    several with one name the first counts. Trajectories that cannot be trained are left out by the
    trainer's own rule (invariant 12).
    """
    found: dict[str, int] = {}
    groups: dict[str, int] = {}
    for draft in one.source.trajectories():
        record = draft.record
        if record.trajectory in found:
            counts["duplicate"] += 1
            continue
        found[record.trajectory] = -1
        if not one.keep(draft):
            counts["filtered_out"] += 1
            continue
        group = groups.get(draft.group, counts["groups"])
        filled = record if draft.has_logprobs else rules.fill(record)
        renamed = _renamed(filled, one.label, group)
        if renamed.finish != "dead" and (wrong := refusal(renamed, rules.bounds)) is not None:
            counts[f"refused_{wrong.kind}"] += 1
            continue
        if draft.group not in groups:
            groups[draft.group] = group
            counts["groups"] += 1
        found[record.trajectory] = group
        counts["trajectories"] += 1
        if not draft.has_logprobs:
            counts["logprobs_computed"] += 1
        _put(writer, group, renamed)
    return found


def check_tokens(label: str, record: Trajectory, vocabulary: int) -> None:
    """Raise `ConfigurationError` for a token outside the model's vocabulary."""
    if len(record.tokens) and int(record.tokens.max()) >= vocabulary:
        raise ConfigurationError(
            f"{label}: trajectory {record.trajectory} has token {int(record.tokens.max())}, and "
            f"the model has {vocabulary} tokens: is it of another tokenizer?"
        )


def _put_annotations(
    writer: ResumedTopicWriter, source: RecordedSource, label: str, named: dict[str, int]
) -> None:
    for note in source.annotations():
        group = named.get(note.trajectory, -1)
        if group >= 0:
            _put(writer, group, replace(note, trajectory=f"{label}/{note.trajectory}", group=group))


def _renamed(record: Trajectory, label: str, group: int) -> Trajectory:
    generated = len(record.logprobs)
    return replace(
        record,
        trajectory=f"{label}/{record.trajectory}",
        group=group,
        spans=(Span(0, generated, START_VERSION),) if record.spans else (),
        trainer_version=START_VERSION,
        wave=0,
    )


def _put(writer: ResumedTopicWriter, group: int, record: Trajectory | Annotation) -> None:
    key = str(group).encode()
    partition = partition_of(key, writer.bus.partitions(writer.topic))
    writer.write(AppendEntry(key, encode(record), partition))
