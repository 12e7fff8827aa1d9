"""Annotates every finished trajectory (`rollstream score`), and commits up to the oldest one that
is not scored yet. After a kill the successor scores what the log lacks; of several annotations of a
(trajectory, name) the first counts.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from rollstream.errors import DecodeError, PositionLost
from rollstream.metric_values import MetricValues
from rollstream.producers.rewards.pool import RewardOutcome, RewardVerdict
from rollstream.producers.scoring.functions import TrajectoryFacts
from rollstream.producers.scoring.recorded import RecordedAnnotations
from rollstream.producers.tasks.base import Turns, turns_of
from rollstream.streams.admissible import NUMBER_MAX, is_bounded_number
from rollstream.streams.bus import Bus, GroupReader, Message
from rollstream.streams.codec import decode
from rollstream.streams.foreign_text import clean_text
from rollstream.streams.records import PROMPT, Annotation, Trajectory
from rollstream.streams.writer import KeyedRecord, append_encoded, encode_each

UNNAMED_SCORE = ""  # name of the score in a verdict if a function returns one number
log = logging.getLogger(__name__)
GROUP, TOPIC = "scoring", "trajectories"
COUNTED = ("scored", "dead", "recorded")
WAIT_S = 0.2  # for the next record while none is open
READ_S = 0.1  # between two reads for more while some are open and the last read found none
PAUSE_S = 0.002  # between two polls of the pool of reward processes
KEEPALIVE_S = 1.0  # between two keep-alive polls of the consumer group while the window is full
WINDOW_PER_PROCESS = 16  # records per reward process; bounds the work repeated after a kill


class ScorerPool(Protocol):
    """Gives every submitted trajectory one verdict: `RewardPool`, or a service (`ServicePool`)."""

    def submit(self, key: str, reference: str, turns: Turns) -> None: ...
    def submit_finished(
        self, key: str, reference: str, turns: Turns, facts: TrajectoryFacts
    ) -> None: ...
    def poll(self) -> list[tuple[str, RewardOutcome]]: ...
    def close(self) -> None: ...


@runtime_checkable
class RecordPool(Protocol):
    """Gives every submitted trajectory one verdict, from its whole record: a model that scores
    tokens.
    """

    def submit_record(self, record: Trajectory) -> None: ...
    def poll(self) -> Sequence[tuple[str, RewardOutcome]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AnnotationPlan:
    """The `names` of the annotations of `scorer`, by the task's judge or by a function."""

    names: tuple[str, ...]
    by_judge: bool
    scorer: str

    def names_of(self, record: Trajectory) -> tuple[str, ...]:
        """Returns the names, without the reward where there is one, as from an agent's program."""
        # Else it would depend on the group's wait for the scorer which reward counts.
        if record.reward is None:
            return self.names
        return tuple(name for name in self.names if name != "reward")


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    record: Trajectory
    partition: int
    offset: int


def first_completions(messages: Iterable[Message]) -> dict[str, ReadCompletion]:
    """Returns by trajectory its first completion in these messages, unless that is a failure, which
    is a completion too (invariant 2).
    """
    # Only the first completion is trained. A later one that is read later is scored again, unless
    # the first is open or annotated, but its annotations are not the first of their names, so they
    # do not count.
    first: dict[str, ReadCompletion] = {}
    for message in messages:
        try:
            record = decode(message.value).record if message.value is not None else None
        except DecodeError:  # the trainer dead-letters it
            continue
        if isinstance(record, Trajectory):
            read = ReadCompletion(record, message.partition, message.offset)
            first.setdefault(record.trajectory, read)
    return {name: read for name, read in first.items() if read.record.finish != "dead"}


def facts_of(record: Trajectory) -> TrajectoryFacts:
    assert record.finish != "dead", f"{record.trajectory} is dead"
    prompt = record.tokens[: int(np.count_nonzero(record.sources == PROMPT))]
    return TrajectoryFacts(
        trajectory=record.trajectory,
        group=record.group,
        index=record.index,
        task=record.task,
        finish=record.finish,
        prompt=prompt.tolist(),
        reward=record.reward,
        scores=record.scores or {},
    )


def annotations(
    record: Trajectory, verdict: RewardVerdict, writes: AnnotationPlan
) -> list[Annotation]:
    """Returns one for each name: a value of the `verdict`, or the reason why there will be none, so
    no reader waits for it in vain.
    """
    values = dict(verdict.scores)
    if writes.by_judge:
        values["reward"] = verdict.reward
    elif UNNAMED_SCORE in values:
        values[writes.names[0]] = values.pop(UNNAMED_SCORE)
    names = writes.names_of(record)
    return [_annotation(record, name, values, verdict, writes.scorer) for name in names]


def _annotation(
    record: Trajectory, name: str, values: dict[str, float], verdict: RewardVerdict, scorer: str
) -> Annotation:
    reason = verdict.reason
    if not reason and name in verdict.vectors:
        return Annotation(record.trajectory, record.group, name, verdict.vectors[name], scorer)
    if not reason and name not in values:
        reason = f"not among what was given ({', '.join(sorted(values)) or 'nothing'})"
    numbers: Sequence[float] = () if reason else (values[name],)
    with np.errstate(over="ignore"):
        array = np.array(numbers, np.float32)
    if not all(map(is_bounded_number, array.tolist())):  # the trainer would ignore the record
        is_wide = bool(np.isfinite(array).all())
        kind = f"beyond ±{NUMBER_MAX:g}" if is_wide else "not a 32-bit number"
        array, reason = np.empty(0, np.float32), f"{values[name]:g} is {kind}"
    return Annotation(record.trajectory, record.group, name, array, scorer, clean_text(reason))


@dataclass(slots=True)
class Scorer:
    """One member of the consumer group, with at most `window` trajectories open."""

    bus: Bus
    pool: ScorerPool | RecordPool
    writes: AnnotationPlan
    window: int
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    """Published `annotations`, and trajectories: `scored`, `dead` (a reason instead of a score),
    and `recorded` ones, whose annotations were in the log.
    """
    recorded: RecordedAnnotations = field(init=False)
    _open: dict[str, ReadCompletion] = field(default_factory=dict[str, ReadCompletion])
    _is_ahead: bool = False
    """Whether a commit would store more than the last one did."""
    _has_found: bool = False
    _polled_s: float = 0.0

    def __post_init__(self) -> None:
        self.recorded = RecordedAnnotations(self.bus)

    def run(self, stop: threading.Event) -> None:
        """Open trajectories are not committed, so the successor scores them."""
        try:
            self._follow(stop)
        finally:
            self.pool.close()

    def _follow(self, stop: threading.Event) -> None:
        reader = self.bus.join(GROUP, TOPIC, self.writes.scorer)
        try:
            while not stop.is_set():
                if not self._read(reader):
                    self._keep_alive(reader)
                if not self._publish() and self._open:
                    stop.wait(PAUSE_S)
            self._commit(reader)
        finally:
            reader.close()

    def _read(self, reader: GroupReader) -> bool:
        room, now_s = self.window - len(self._open), self.clock()
        # Reads at once if no trajectory is open, or if half of the window is free and the last read
        # found some; else `READ_S` after the last read.
        is_half_free = 2 * room >= self.window and self._has_found
        if self._open and not (room and (is_half_free or now_s >= self._polled_s + READ_S)):
            return False
        self._commit(reader)
        messages = self._poll(reader, 0.0 if self._open else WAIT_S, room)
        self._has_found, self._polled_s = bool(messages), self.clock()
        self._take(messages)
        return True

    def _keep_alive(self, reader: GroupReader) -> None:
        if self.clock() >= self._polled_s + KEEPALIVE_S:
            # A poll without records keeps this member in the group.
            reader.poll(0.0, 0)
            self._polled_s = self.clock()

    def _commit(self, reader: GroupReader) -> None:
        if self._is_ahead:
            # Up to the oldest open trajectory of each partition.
            before: dict[int, int] = {}
            for read in self._open.values():
                before[read.partition] = min(read.offset, before.get(read.partition, read.offset))
            reader.commit(before)
            self._is_ahead = False

    def _poll(self, reader: GroupReader, wait_s: float, records_max: int) -> list[Message]:
        try:
            return reader.poll(wait_s, records_max)
        except PositionLost as lost:
            # Truncated records belong to groups that have ended, so no reader waits for their
            # annotations.
            log.warning("%s; skipped by partition: %s", lost, reader.pass_lost())
            self._is_ahead = True
            # By this member's reader: Kafka refuses commits from outside the group while another
            # scorer lives, and the error would end the run.
            self._commit(reader)
            return []

    def _take(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        self._is_ahead = True
        self.recorded.advance()
        for name, read in first_completions(messages).items():
            if self.recorded.has(name, self.writes.names_of(read.record)):
                self.counts["recorded"] += 1
            elif name not in self._open:
                self._open[name] = read
                self._submit(read.record)

    def _submit(self, record: Trajectory) -> None:
        if isinstance(self.pool, RecordPool):
            self.pool.submit_record(record)
            return
        starts = [branch.start for branch in record.branches]
        turns = turns_of(record.tokens, record.sources, starts)
        if self.writes.by_judge:
            self.pool.submit(record.trajectory, record.reference, turns)
        else:
            name = record.trajectory
            self.pool.submit_finished(name, record.reference, turns, facts_of(record))

    def _publish(self) -> bool:
        entries: list[KeyedRecord] = []
        decided = self.pool.poll()
        for trajectory, outcome in decided:
            assert isinstance(outcome, RewardVerdict), "the reward pool replied instead of scoring"
            record = self._open[trajectory].record
            self.counts["dead" if outcome.dead else "scored"] += 1
            if outcome.dead:
                log.warning("%s is not scored: %s", record.trajectory, outcome.reason)
            entries += [(str(record.group), a) for a in annotations(record, outcome, self.writes)]
        if entries:
            encoded, refused = encode_each(self.bus, "annotations", entries)
            for reason in refused.values():
                log.error("an annotation is refused: %s", reason)
            append_encoded(self.bus, "annotations", encoded)
            self.counts["annotations"] += len(encoded)
        for trajectory, _ in decided:
            del self._open[trajectory]
            self._is_ahead = True
        return bool(decided)

    def metric_values(self) -> MetricValues:
        ends, committed = self.bus.end(TOPIC), self.bus.committed(GROUP, TOPIC)
        begin = self.bus.begin(TOPIC)
        at = {p: committed[p].offset if p in committed else begin[p] for p in ends}
        return {
            "score_trajectories_total": {name: self.counts[name] for name in COUNTED},
            "score_annotations_total": self.counts["annotations"],
            "score_behind_records": sum(max(0, end - at[p]) for p, end in ends.items()),
        }
