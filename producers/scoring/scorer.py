"""The scorer: reads finished trajectories and writes annotations about them, in batches.

Scorers share the partitions of `trajectories` as a consumer group. A batch is committed once all
its annotations are in the log. After a kill the successor scores the batch again, and the first
annotation of a (trajectory, name) counts, so nothing is lost. Only the first completion of a
trajectory is scored; a later one is in the same batch, where it is left out, or in a later batch.
An annotation therefore describes the tokens that are trained (invariant 2).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.producers.rewards.pool import RewardOutcome, RewardPool, RewardVerdict
from rollstream.producers.scoring.annotate import AnnotationPlan, annotations, facts_of, first_completions
from rollstream.producers.tasks.base import turns_of
from rollstream.streams.bus import Bus, GroupReader, Message
from rollstream.errors import PositionLost
from rollstream.metric_values import MetricValues
from rollstream.streams.records import Trajectory
from rollstream.streams.writer import KeyedRecord, publish_all

log = logging.getLogger(__name__)

GROUP, TOPIC = "scoring", "trajectories"
WAIT_S = 0.2
PAUSE_S = 0.002  # between two polls of the pool
KEEPALIVE_S = 1.0  # between two keep-alive polls of the consumer group during a long batch
BATCH_PER_PROCESS = 16  # bounds the work that a successor repeats after a kill


@dataclass(slots=True)
class Scorer:
    """One member of the group, under its own name (`writes.scorer`)."""

    bus: Bus
    pool: RewardPool
    writes: AnnotationPlan
    batch: int
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    """What this process published: annotations, and trajectories `scored` or `dead`."""

    def run(self, stop: threading.Event) -> None:
        """Score until `stop`. The successor scores a batch that was incomplete then."""
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
        """Read the next batch. Truncated records belong to groups that have ended, so nothing waits
        for their annotations. They are skipped as a member of the group: while another scorer
        lives, Kafka refuses commits from outside the group, and a scorer that failed for this
        reason would end the run.
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
        """Publish annotations of all records. Returns False if it was stopped before."""
        for record in records.values():
            self._submit(record)
        outstanding, alive_s = set(records), self.clock()
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

    def figures(self) -> MetricValues:
        """What this process published, and how many records the whole group is behind."""
        ends, committed = self.bus.end(TOPIC), self.bus.committed(GROUP, TOPIC)
        begin = self.bus.begin(TOPIC)
        at = {p: committed[p].offset if p in committed else begin[p] for p in ends}
        return {
            "score_trajectories_total": {name: self.counts[name] for name in ("scored", "dead")},
            "score_annotations_total": self.counts["annotations"],
            "score_behind_records": sum(max(0, end - at[p]) for p, end in ends.items()),
        }
