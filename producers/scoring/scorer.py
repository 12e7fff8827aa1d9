"""Writes annotations, such as late rewards, about every finished trajectory (`rollstream score`).

A `Scorer` reads a batch of trajectories, has them scored by the task's judge, by a function of the
user or by a service, publishes the annotations, and commits the batch after them. Scorers share the
partitions of `trajectories` as a consumer group. After a kill the successor reads the batch again
and scores what is not in the log yet (`recorded.py`); of several annotations of a (trajectory,
name) the first counts, so none is lost or counted twice. One that counts describes the tokens that
are trained (`first_completions`).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
from rollstream.streams.records import PROMPT, Annotation, Trajectory
from rollstream.streams.writer import KeyedRecord, publish_all

UNNAMED_SCORE = ""  # name of the score in a verdict if a function returns one number
log = logging.getLogger(__name__)
GROUP, TOPIC = "scoring", "trajectories"
COUNTED = ("scored", "dead", "recorded")
WAIT_S = 0.2  # for the first record of a batch
PAUSE_S = 0.002  # between two polls of the pool of reward processes
KEEPALIVE_S = 1.0  # between two keep-alive polls of the consumer group during a long batch
BATCH_PER_PROCESS = 16  # records per reward process; bounds the work repeated after a kill


class ScorerPool(Protocol):
    """Gives every submitted trajectory one verdict: `RewardPool`, or a service (`ServicePool`)."""

    def submit(self, key: str, reference: str, turns: Turns) -> None: ...
    def submit_finished(
        self, key: str, reference: str, turns: Turns, facts: TrajectoryFacts
    ) -> None: ...
    def poll(self) -> list[tuple[str, RewardOutcome]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AnnotationPlan:
    """States the `names` of the annotations that the scorer named `scorer` writes about each
    trajectory, and whether their values come from the task's judge or from a function.
    """

    names: tuple[str, ...]
    by_judge: bool
    scorer: str


def first_completions(messages: Iterable[Message]) -> dict[str, Trajectory]:
    """Return the trajectories to score, by name: of each trajectory its first completion in these
    messages. If that one is a failure, which is a completion too (invariant 2), the trajectory is
    dead, gets no annotation, and is left out.

    Only the first completion of a trajectory is trained. A later one in the same batch is left out
    here. One in a later batch is scored again, but its annotations are not the first of their
    names, so they do not count.
    """
    first: dict[str, Trajectory] = {}
    for message in messages:
        try:
            record = decode(message.value).record if message.value is not None else None
        except DecodeError:  # the trainer dead-letters it
            continue
        if isinstance(record, Trajectory):
            first.setdefault(record.trajectory, record)
    return {name: record for name, record in first.items() if record.finish != "dead"}


def facts_of(record: Trajectory) -> TrajectoryFacts:
    """Return the facts that a user's function gets about a trajectory, which must not be dead."""
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
    """Return one annotation for each name that the scorer writes, made from the `verdict` of a
    reward process. It has a value, or the reason why there will be none, so no reader waits for it
    in vain.
    """
    values = dict(verdict.scores)
    if writes.by_judge:
        values["reward"] = verdict.reward
    elif UNNAMED_SCORE in values:
        values[writes.names[0]] = values.pop(UNNAMED_SCORE)
    return [_annotation(record, name, values, verdict, writes.scorer) for name in writes.names]


def _annotation(
    record: Trajectory, name: str, values: dict[str, float], verdict: RewardVerdict, scorer: str
) -> Annotation:
    reason = verdict.reason
    if not reason and name not in values:
        reason = f"not among what was given ({', '.join(sorted(values)) or 'nothing'})"
    found: Sequence[float] = () if reason else (values[name],)
    with np.errstate(over="ignore"):
        array = np.array(found, np.float32)
    if not all(map(is_bounded_number, array.tolist())):  # the trainer would ignore the record
        is_wide = bool(np.isfinite(array).all())
        kind = f"beyond ±{NUMBER_MAX:g}" if is_wide else "not a 32-bit number"
        array, reason = np.empty(0, np.float32), f"{values[name]:g} is {kind}"
    return Annotation(record.trajectory, record.group, name, array, scorer, reason)


@dataclass(slots=True)
class Scorer:
    """Scores as one member of the consumer group, under its own name (`writes.scorer`): reads a
    batch of at most `batch` records, lets the reward processes of `pool` score it, publishes the
    annotations, and commits the batch once all of them are in the log.
    """

    bus: Bus
    pool: ScorerPool
    writes: AnnotationPlan
    batch: int
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    """Counts the `annotations` that this process published, and trajectories: those `scored`,
    `dead` ones, which got a reason instead of a score, and `recorded` ones, whose annotations were
    in the log already.
    """
    recorded: RecordedAnnotations = field(init=False)

    def __post_init__(self) -> None:
        self.recorded = RecordedAnnotations(self.bus)

    def run(self, stop: threading.Event) -> None:
        """Score until `stop` is set, then close the pool. A batch that is incomplete by then is not
        committed, so the successor scores it.
        """
        try:
            self._follow(stop)
        finally:
            self.pool.close()

    def _follow(self, stop: threading.Event) -> None:
        reader = self.bus.join(GROUP, TOPIC, self.writes.scorer)
        try:
            while not stop.is_set():
                messages = self._poll(reader)
                if messages and self._score(first_completions(messages), reader, stop):
                    reader.commit()
        finally:
            reader.close()

    def _poll(self, reader: GroupReader) -> list[Message]:
        """Read the next batch. Records that were truncated unread are skipped: they belong to
        groups that have ended, so no reader waits for their annotations. The commit after a skip
        goes through this member's `reader`, because Kafka refuses commits from outside the group
        while another scorer lives, and the error would end the run.
        """
        try:
            return reader.poll(WAIT_S, self.batch)
        except PositionLost as lost:
            log.warning("%s; skipped by partition: %s", lost, reader.pass_lost())
            reader.commit()
            return []

    def _score(
        self, records: Mapping[str, Trajectory], reader: GroupReader, stop: threading.Event
    ) -> bool:
        """Score the records that are not annotated yet, and publish the annotations of each as soon
        as its verdict is there. Returns False if `stop` was set before all were published.
        """
        self.recorded.advance()
        outstanding = {name for name in records if not self.recorded.has(name, self.writes.names)}
        self.counts["recorded"] += len(records) - len(outstanding)
        for name, record in records.items():
            if name in outstanding:
                self._submit(record)
        alive_s = self.clock()
        while outstanding:
            decided = [(records[trajectory], outcome) for trajectory, outcome in self.pool.poll()]
            self._publish(decided)
            outstanding -= {record.trajectory for record, _ in decided}
            if self.clock() - alive_s >= KEEPALIVE_S:
                reader.poll(0.0, 0)
                alive_s = self.clock()
            if not decided and stop.wait(PAUSE_S):
                return False
        return True

    def _submit(self, record: Trajectory) -> None:
        turns = turns_of(record.tokens, record.sources)
        if self.writes.by_judge:
            self.pool.submit(record.trajectory, record.reference, turns)
        else:
            name = record.trajectory
            self.pool.submit_finished(name, record.reference, turns, facts_of(record))

    def _publish(self, decided: Sequence[tuple[Trajectory, RewardOutcome]]) -> None:
        entries: list[KeyedRecord] = []
        for record, outcome in decided:
            assert isinstance(outcome, RewardVerdict), "the reward pool replied instead of scoring"
            self.counts["dead" if outcome.dead else "scored"] += 1
            if outcome.dead:
                log.warning("%s is not scored: %s", record.trajectory, outcome.reason)
            entries += [(str(record.group), a) for a in annotations(record, outcome, self.writes)]
        if entries:
            publish_all(self.bus, "annotations", entries)
            self.counts["annotations"] += len(entries)

    def metric_values(self) -> MetricValues:
        """Return the counts of this process, and how many records the whole consumer group has not
        committed yet.
        """
        ends, committed = self.bus.end(TOPIC), self.bus.committed(GROUP, TOPIC)
        begin = self.bus.begin(TOPIC)
        at = {p: committed[p].offset if p in committed else begin[p] for p in ends}
        return {
            "score_trajectories_total": {name: self.counts[name] for name in COUNTED},
            "score_annotations_total": self.counts["annotations"],
            "score_behind_records": sum(max(0, end - at[p]) for p, end in ends.items()),
        }
