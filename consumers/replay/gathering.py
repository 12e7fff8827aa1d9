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

from consumers.replay.continued import Continued, begin, refuse_others
from consumers.replay.copying import batches
from streams.admissible import TrainingBounds, refusal
from streams.bus import Bus, Entry, Message
from streams.codec import decode, encode
from streams.errors import ConfigurationError, DecodeError
from streams.records import Address, Annotation, Record, Span, Trajectory, Version
from streams.topics import partition_of

TOPICS = ("trajectories", "annotations")
START = Version(0, 0)


@dataclass(frozen=True, slots=True)
class Draft:
    """A trajectory of a source. `group` is the source's own name of its group, `at` its address if
    the source is a log.
    """

    group: str
    record: Trajectory
    timestamp_ms: int
    at: Address | None
    has_logprobs: bool = True


class Source(Protocol):
    def trajectories(self) -> Iterator[Draft]:
        """Yield the source's trajectories, in the same order at each call."""
        ...


@dataclass(frozen=True, slots=True)
class Archived:
    """A run's log or archive as a source; trajectories are ordered by completion time."""

    log: Bus
    counts: Counter[str] = field(default_factory=Counter[str])

    def trajectories(self) -> Iterator[Draft]:
        """All completions; records that cannot be decoded are counted as `unreadable`."""
        for message, record in self._records("trajectories"):
            if isinstance(record, Trajectory):
                at = Address(message.partition, message.offset)
                yield Draft(str(record.group), record, message.timestamp_ms, at)

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
        for messages in batches(self.log, topic, partition, first, end):
            yield from messages


@dataclass(frozen=True, slots=True)
class Named:
    """A source, the label that prefixes its trajectories' names, and a filter."""

    label: str
    source: Source
    keep: Callable[[Draft], bool] = lambda draft: True


@dataclass(frozen=True, slots=True)
class Rules:
    """Trajectories outside `bounds` are left out. `fill` adds missing log-probabilities; the tokens
    of such a trajectory must be checked before (`check`).
    """

    bounds: TrainingBounds
    fill: Callable[[Trajectory], Trajectory]


def gather(sources: Sequence[Named], log: Bus, rules: Rules, where: str) -> Counter[str]:
    """Write the sources' trajectories and annotations into `log`; returns counts of those taken and
    left out.
    """
    refuse_others(log, TOPICS, where)
    for topic in TOPICS:
        begin(log, topic)
    counts: Counter[str] = Counter()
    writers = {topic: Continued(log, topic, where) for topic in TOPICS}
    for one in sources:
        groups = _put_trajectories(writers["trajectories"], one, rules, counts)
        if isinstance(one.source, Archived):
            _put_annotations(writers["annotations"], one.source, one.label, groups)
            counts.update(one.source.counts)
    for writer in writers.values():
        writer.close()
    return counts


def _put_trajectories(
    writer: Continued, one: Named, rules: Rules, counts: Counter[str]
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


def check(label: str, record: Trajectory, vocabulary: int) -> None:
    """Raise `ConfigurationError` for a token outside the model's vocabulary."""
    if len(record.tokens) and int(record.tokens.max()) >= vocabulary:
        raise ConfigurationError(
            f"{label}: trajectory {record.trajectory} has token {int(record.tokens.max())}, and "
            f"the model has {vocabulary} tokens: is it of another tokenizer?"
        )


def _put_annotations(
    writer: Continued, source: Archived, label: str, named: dict[str, int]
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
        spans=(Span(0, generated, START),) if record.spans else (),
        trainer_version=START,
        wave=0,
    )


def _put(writer: Continued, group: int, record: Trajectory | Annotation) -> None:
    key = str(group).encode()
    partition = partition_of(key, writer.bus.partitions(writer.topic))
    writer.write(Entry(key, encode(record), partition))
