"""Merges the trajectories of several sources, runs or files of JSON lines, into one log, as groups
of a new run that trains on them alone (docs/reference/replay.md). `gather_sources` writes each
once, as `LABEL/NAME`. After a kill the same call resumes.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.errors import ConfigurationError, DecodeError
from rollstream.keep.replay.topic_copy import ResumedTopicWriter, mark_begun, refuse_foreign_records
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.codec import decode, encode
from rollstream.streams.reader import read_range
from rollstream.streams.records import GENERATED, PROMPT, Annotation, Record, Trajectory
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Address, Span, Version

TOPICS = ("trajectories", "annotations")
START_VERSION = Version(0, 0)
"""The version of all spans that are written: no version of the new run made these tokens, and
version 0 precedes its training.
"""


@dataclass(frozen=True, slots=True)
class SourceTrajectory:
    """A trajectory as its source has it. `group` is the source's own name of the group, `at` the
    address in a log. Without `has_logprobs` the record's are placeholders; `behaviour` then is the
    run's folder and the number of its version that emitted the tokens, if known.
    """

    group: str
    record: Trajectory
    timestamp_ms: int
    at: Address | None
    has_logprobs: bool = True
    behaviour: tuple[str, int] | None = None


class TrajectorySource(Protocol):
    """The interface of a source of trajectories."""

    def trajectories(self) -> Iterator[SourceTrajectory]:
        """Yields the source's trajectories, in the same order at each call."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """A run's log or archive, up to its end at the time of the call, merged by timestamps. `counts`
    gets `unreadable`, records left out because they cannot be decoded.
    """

    log: Bus
    counts: Counter[str] = field(default_factory=Counter[str])

    def trajectories(self) -> Iterator[SourceTrajectory]:
        for message, record in self._records("trajectories"):
            if isinstance(record, Trajectory):
                at = Address(message.partition, message.offset)
                yield SourceTrajectory(str(record.group), record, message.timestamp_ms, at)

    def annotations(self) -> Iterator[Annotation]:
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
        for messages in read_range(self.log, topic, partition, first, end):
            yield from messages


@dataclass(frozen=True, slots=True)
class LabelledSource:
    """A source, the label of its trajectories in the new log, and a filter."""

    label: str
    source: TrajectorySource
    keep: Callable[[SourceTrajectory], bool] = lambda trajectory: True


Fill = Callable[[SourceTrajectory], Trajectory]
"""Completes a trajectory without log-probabilities by those of a model: `check_tokens` first."""


def gather_sources(
    sources: Sequence[LabelledSource], log: Bus, bounds: TrainingBounds, fill: Fill, where: str
) -> Counter[str]:
    """Writes the sources' trajectories that can be trained within `bounds`, and the annotations of
    runs, into `log`; returns counts of trajectories and groups taken, and of trajectories left out
    by reason. Groups are numbered in the order of appearance. Raises `ConfigurationError`, which
    names the log as `where`, if it holds other records.
    """
    refuse_foreign_records(log, TOPICS, where)
    for topic in TOPICS:
        mark_begun(log, topic)
    counts: Counter[str] = Counter()
    writers = {topic: ResumedTopicWriter(log, topic, where) for topic in TOPICS}
    for labelled in sources:
        groups = _put_trajectories(writers["trajectories"], labelled, bounds, fill, counts)
        if isinstance(labelled.source, RecordedSource):
            _put_annotations(writers["annotations"], labelled.source, labelled.label, groups)
            counts.update(labelled.source.counts)
    for writer in writers.values():
        writer.close()
    return counts


def _put_trajectories(
    writer: ResumedTopicWriter,
    labelled: LabelledSource,
    bounds: TrainingBounds,
    fill: Fill,
    counts: Counter[str],
) -> dict[str, int]:
    """Returns the new group of each trajectory of one source by its name there, -1 for one that was
    left out.
    """
    group_of: dict[str, int] = {}
    groups: dict[str, int] = {}
    for trajectory in labelled.source.trajectories():
        record = trajectory.record
        # Of several trajectories with one name the first alone is considered.
        if record.trajectory in group_of:
            counts["duplicate"] += 1
            continue
        group_of[record.trajectory] = -1
        if not labelled.keep(trajectory):
            counts["filtered_out"] += 1
            continue
        group = groups.get(trajectory.group, counts["groups"])
        filled = record if trajectory.has_logprobs else fill(trajectory)
        renamed = _renamed(filled, labelled.label, group)
        # The trainer's own rule (invariant 12). Dead ones are members of their groups.
        if renamed.finish != "dead" and (wrong := refusal(renamed, bounds)) is not None:
            counts[f"refused_{wrong.kind}"] += 1
            continue
        if trajectory.group not in groups:
            groups[trajectory.group] = group
            counts["groups"] += 1
        group_of[record.trajectory] = group
        counts["trajectories"] += 1
        if not trajectory.has_logprobs:
            counts["logprobs_recomputed" if trajectory.behaviour else "logprobs_computed"] += 1
        _put(writer, group, renamed)
    return group_of


def check_tokens(label: str, record: Trajectory, vocabulary: int) -> None:
    """Raises `ConfigurationError` if the trajectory has a token outside of the model's vocabulary
    of this size.
    """
    if len(record.tokens) and int(record.tokens.max()) >= vocabulary:
        raise ConfigurationError(
            f"{label}: trajectory {record.trajectory} has token {int(record.tokens.max())}, and "
            f"the model has {vocabulary} tokens: is it of another tokenizer?"
        )


def _put_annotations(
    writer: ResumedTopicWriter, source: RecordedSource, label: str, groups: dict[str, int]
) -> None:
    for note in source.annotations():
        group = groups.get(note.trajectory, -1)
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


LINE_BYTES_MAX = 64 << 20
LOGPROB_MAX = 1e-3  # rounding error of a token with probability 1
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
TextEncoder = Callable[[str], Sequence[int]]


class OfflineLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of a file: `prompt` and `completion`, each as text or as tokens, or, for several
    turns, `tokens` with the source of each in `sources` (0 prompt, 1 generated, 2 environment).
    docs/reference/replay.md explains the fields.
    """

    reward: float
    prompt: str | list[Token] | None = None
    completion: str | list[Token] | None = None
    tokens: list[Token] | None = None
    sources: list[Literal[0, 1, 2]] | None = None
    logprobs: list[float] | None = None
    temperature: float = 1.0
    group: str | int | None = None
    trajectory: str | None = None
    task: str = "offline"
    finish: Literal["stop", "length"] = "stop"
    run: str | None = None
    version: Annotated[int, msgspec.Meta(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file with one trajectory per line, as JSON (`OfflineLine`). `encode` is the model's
    tokenizer, if it has one; text is encoded without chat template, and without special tokens
    except those written in it.
    """

    path: Path
    encode: TextEncoder | None

    def trajectories(self) -> Iterator[SourceTrajectory]:
        """Yields the trajectories in the order of lines. An invalid line, or a second trajectory of
        the same name, raises a `ConfigurationError` with file, line and remedy; empty lines are
        skipped.
        """
        decoder = msgspec.json.Decoder(OfflineLine)
        names: set[str] = set()
        for number, text in self._lines():
            try:
                trajectory = self._parsed(decoder.decode(text), number)
                if trajectory.record.trajectory in names:
                    raise ValueError(f"a second trajectory {trajectory.record.trajectory!r}")
                names.add(trajectory.record.trajectory)
                yield trajectory
            except (DecodeError, ValueError, RecursionError) as error:
                raise ConfigurationError(
                    f"{self.path} line {number}: {error}; correct the line or remove it "
                    "(docs/reference/replay.md has the format)"
                ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb") as file:
            number = 0
            while text := file.readline(LINE_BYTES_MAX):
                number += 1
                if len(text) == LINE_BYTES_MAX:
                    raise ConfigurationError(
                        f"{self.path} line {number} is longer than {LINE_BYTES_MAX >> 20} MiB"
                    )
                if text.strip():
                    yield number, text

    def _parsed(self, line: OfflineLine, number: int) -> SourceTrajectory:
        tokens, sources = self._tokens(line)
        generated = sources.count(GENERATED)
        has_logprobs = line.logprobs is not None
        record = Trajectory(
            trajectory=line.trajectory or f"line-{number}",
            group=0,
            index=0,
            attempt=1,
            task=line.task,
            rollout=self.path.name,
            rollout_term=0,
            tokens=np.array(tokens, np.uint32),
            sources=np.array(sources, np.uint8),
            logprobs=np.array(line.logprobs if has_logprobs else [0.0] * generated, np.float32),
            spans=(Span(0, generated, START_VERSION),),
            finish=line.finish,
            reward=line.reward,
            trainer_version=START_VERSION,
            started_s=0.0,
            finished_s=0.0,
            temperature=line.temperature,
        )
        # Raises if no model can train it.
        sample_of(record, 0.0)
        if len(record.logprobs) and record.logprobs.max() > LOGPROB_MAX:
            raise ValueError("a log-probability is above 0")
        prompt = next(i for i, source in enumerate(sources) if source != PROMPT)
        # Lines with the same prompt tokens are a group by default.
        group = f"={line.group}" if line.group is not None else repr(tokens[:prompt])
        return SourceTrajectory(group, record, 0, None, has_logprobs, _behaviour_of(line))

    def _tokens(self, line: OfflineLine) -> tuple[list[int], list[int]]:
        if line.tokens is not None and line.prompt is None and line.completion is None:
            if line.sources is None:
                raise ValueError("`tokens` need `sources`, one for each of them")
            return line.tokens, [*line.sources]
        if line.prompt is None or line.completion is None or line.tokens or line.sources:
            raise ValueError("give `prompt` and `completion`, or `tokens` and `sources`")
        prompt, completion = self._encoded(line.prompt), self._encoded(line.completion)
        return prompt + completion, [PROMPT] * len(prompt) + [GENERATED] * len(completion)

    def _encoded(self, text_or_tokens: str | list[int]) -> list[int]:
        if not isinstance(text_or_tokens, str):
            return text_or_tokens
        if self.encode is None:
            raise ValueError(
                "text needs the model's tokenizer, and its folder has no tokenizer.json; give "
                "tokens instead"
            )
        return list(self.encode(text_or_tokens))


def _behaviour_of(line: OfflineLine) -> tuple[str, int] | None:
    if line.run is None and line.version is None:
        return None
    if line.run is None or line.version is None or line.logprobs is not None:
        raise ValueError("give `run` and `version` together, in place of `logprobs`")
    return line.run, line.version
