"""Trajectories of several sources in one log, as groups of a run of their own: numbered in the
order in which they first appear, each trajectory once, under the name of its source.

Their versions are of other trainers, so all their spans become version 0, which was before anything
that is trained here. Killed and run again over the same sources it goes on where it was.
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
    """A trajectory as its source has it, the `group` by any name; `at` where it lay in a log."""

    group: str
    record: Trajectory
    timestamp_ms: int
    at: Address | None
    has_logprobs: bool = True


class Source(Protocol):
    def drafts(self) -> Iterator[Draft]:
        """The same ones in the same order each time."""
        ...


@dataclass(frozen=True, slots=True)
class Archived:
    """The trajectories of a run's log or archive by the time of their completion."""

    log: Bus
    counts: Counter[str] = field(default_factory=Counter[str])

    def drafts(self) -> Iterator[Draft]:
        """All completions; bytes that are none are counted as `unreadable`."""
        for message, record in self._records("trajectories"):
            if isinstance(record, Trajectory):
                at = Address(message.partition, message.offset)
                yield Draft(str(record.group), record, message.timestamp_ms, at)

    def notes(self) -> Iterator[Annotation]:
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
    """A source under the name that its trajectories get, and which of them are wanted."""

    label: str
    source: Source
    keep: Callable[[Draft], bool] = lambda draft: True


@dataclass(frozen=True, slots=True)
class Rules:
    """What is beyond `bounds` is left out; `fill` adds the log-probabilities that a draft lacks, so
    tokens of such a draft are checked before (`check`).
    """

    bounds: TrainingBounds
    fill: Callable[[Trajectory], Trajectory]


def gather(sources: Sequence[Named], log: Bus, rules: Rules, where: str) -> Counter[str]:
    """Write everything into `log`; counts of what was taken and of what was not."""
    refuse_others(log, TOPICS, where)
    for topic in TOPICS:
        begin(log, topic)
    counts: Counter[str] = Counter()
    writers = {topic: Continued(log, topic, where) for topic in TOPICS}
    for one in sources:
        groups = _put_drafts(writers["trajectories"], one, rules, counts)
        if isinstance(one.source, Archived):
            _put_notes(writers["annotations"], one.source, one.label, groups)
            counts.update(one.source.counts)
    for writer in writers.values():
        writer.close()
    return counts


def _put_drafts(
    writer: Continued, one: Named, rules: Rules, counts: Counter[str]
) -> dict[str, int]:
    """The group of each trajectory, -1 of one that was left out; the first of a name counts. One
    that cannot be trained is left out by the rule that the trainer has (invariant 12).
    """
    found: dict[str, int] = {}
    groups: dict[str, int] = {}
    for draft in one.source.drafts():
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
    """`ConfigurationError` for tokens that the model has not."""
    if len(record.tokens) and int(record.tokens.max()) >= vocabulary:
        raise ConfigurationError(
            f"{label}: trajectory {record.trajectory} has token {int(record.tokens.max())}, and "
            f"the model has {vocabulary}: is it of another tokenizer?"
        )


def _put_notes(writer: Continued, source: Archived, label: str, named: dict[str, int]) -> None:
    for note in source.notes():
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
    writer.put(Entry(key, encode(record), partition))
