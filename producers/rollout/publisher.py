"""Publishes all records of a rollout: trajectories, partials, status, applied versions.

Delivery is at least once. Readers count only the first completion of a trajectory and follow only
the chain of partials that an assignment names (invariant 2), so it does no harm if a dead
predecessor of this rollout has published the same records.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram
from rollstream.producers.engines.base import DraftStats, EngineStats
from rollstream.producers.rollout.heartbeat import Health, Heartbeat, StatusSchedule
from rollstream.producers.rollout.sender import RecordSender
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.weights import ReadBackResult
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.bus import Bus
from rollstream.streams.records import Applied, Partial, RolloutStatus, Trajectory
from rollstream.streams.values import Address, Version


@dataclass(frozen=True, slots=True)
class RolloutCondition:
    """The fields of a status record that do not come from the engine."""

    version: Version
    health: Health
    queued: int
    quota_left: int
    verified: bool
    pulling: bool = False


@dataclass(slots=True)
class RolloutPublisher:
    """The publisher of one rollout under one term."""

    bus: Bus
    sender: RecordSender
    name: str
    term: int
    settings: RolloutSettings
    status_schedule: StatusSchedule
    clock: Callable[[], float] = time.time
    last_status: RolloutStatus | None = None
    finishes: Counter[str] = field(default_factory=Counter[str])
    apply_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))
    _given_up: list[RunningTrajectory] = field(default_factory=list[RunningTrajectory])
    batch_max: int | None = None
    """B_max of the engine; None: its number of slots."""
    preemptible: bool = False
    """The machine may be taken away at any moment."""
    drafts: DraftStats = field(default_factory=DraftStats)
    """Draft statistics of the last heartbeat."""
    heartbeat: Heartbeat | None = None
    """Sends `status` in a thread beside the loop. None: `sender` sends it, and nothing
    is repeated.
    """

    def trajectories(self, done: Sequence[Trajectory]) -> None:
        """Publish finished trajectories and count them by finish once they are durable."""
        if done:
            finishes = [t.finish for t in done]
            records = [(str(t.group), t) for t in done]
            self.sender.send("trajectories", records, lambda _: self.finishes.update(finishes))

    def partials(self, running: Sequence[RunningTrajectory]) -> None:
        """Publish partials that are due: `partial_tokens` new tokens, or new tokens after
        `partial_s` seconds.
        """
        now = self.clock()
        due = [one for one in running if one.has_unpublished() and self._is_due(one, now)]
        if not due:
            return
        self._send(due, [one.take_partial(self.name, self.term, now) for one in due])

    def _send(self, due: Sequence[RunningTrajectory], records: Sequence[Partial]) -> None:
        entries: list[tuple[str, Partial]] = [(r.trajectory, r) for r in records]

        def on_published(addresses: list[Address]) -> None:
            for one, at in zip(due, addresses, strict=True):
                one.partial_published(at)

        self.sender.send("partials", entries, on_published)

    def give_up(self, running: Sequence[RunningTrajectory]) -> None:
        """Publish the last partial of each trajectory, once its previous partial is durable. Later
        calls publish the ones that had to wait.
        """
        self._given_up += running
        due = [one for one in self._given_up if not one.flushing]
        self._given_up = [one for one in self._given_up if one.flushing]
        if due:
            now = self.clock()
            last = [one.take_partial(self.name, self.term, now, last=True) for one in due]
            self._send(due, last)

    def flush_given_up(self) -> None:
        """Return when the last partials of all trajectories that were given up are durable."""
        self.sender.flush()
        self.give_up(())
        self.sender.flush()

    def applied(self, verdict: ReadBackResult) -> None:
        """Publish that the engine serves a version. The record holds the manifest's hash in place
        of one hash per tensor; the fetch has checked each tensor against its own hash.
        """
        announced, count = verdict.fetched.announced, verdict.compared.count
        record = Applied(
            rollout=self.name,
            rollout_term=self.term,
            version=announced.version,
            hash=announced.manifest_hash,
            checked="read_back" if count else "hashes",
            tensors=len(verdict.fetched.update.tensors),
            seconds=verdict.seconds,
            time_s=self.clock(),
            compared=count,
        )
        self.sender.send("applied", [(self.name, record)])
        self.apply_s.add(verdict.seconds)

    def status(self, condition: RolloutCondition, stats: EngineStats) -> None:
        """Send a heartbeat with the present load."""
        now = self.clock()
        record = RolloutStatus(
            rollout=self.name,
            term=self.term,
            slots=stats.slots,
            running=stats.running,
            waiting=stats.waiting + condition.queued,
            kv_used=stats.kv_used,
            kv_capacity=stats.kv_capacity,
            version=condition.version,
            verified=condition.verified,
            health=condition.health,
            quota_left=condition.quota_left,
            tokens_per_s=self.status_schedule.note_sent(condition.health, stats.tokens, now),
            tokens_total=stats.tokens,
            idle_s=self.status_schedule.idle_s,
            time_s=now,
            busy_s=stats.busy_s,
            kv_previous=self.status_schedule.previous_kv(stats.kv_used, now),
            decode_batch_max=stats.slots if self.batch_max is None else self.batch_max,
            pulling=condition.pulling,
            queued=condition.queued,
            preemptible=self.preemptible,
        )
        if self.heartbeat is None:
            self.sender.send("status", [(f"{self.name}/{self.term}", record)])
        else:
            self.heartbeat.send(record)
        self.last_status, self.drafts = record, stats.drafts

    def note_iteration(self) -> None:
        """Note that the loop has started another iteration, so it is not stalled."""
        if self.heartbeat is not None:
            self.heartbeat.note_iteration()

    def end(self) -> None:
        """Return when the last status is durable and no heartbeat can follow it."""
        if self.heartbeat is not None:
            self.heartbeat.end()
        self.sender.flush()

    def close(self) -> None:
        """Send no further heartbeat: the loop has ended, normally or by an error."""
        if self.heartbeat is not None:
            self.heartbeat.close()

    def _is_due(self, running: RunningTrajectory, now_s: float) -> bool:
        gained = running.length - running.flushed
        late = now_s - running.flushed_s >= self.settings.partial_s
        return late or gained >= self.settings.partial_tokens
