"""Publishes all records of a rollout (trajectories, partials, status, applied versions), and
collects its metrics. `RolloutPublisher` makes the records; `BackgroundSender` appends them to the
log in a thread of its own, so that decoding does not wait for the log.

A trajectory may be published twice, by this rollout and by its dead predecessor. That does no harm:
readers count only the first completion (invariant 2), and resume only from the chain of partials
that an assignment names.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram, MetricValue, MetricValues
from rollstream.producers.engines.base import DraftStats, EngineStats
from rollstream.producers.rollout.heartbeat import Health, Heartbeat, StatusSchedule
from rollstream.producers.rollout.read_back import ReadBackResult
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.bus import Bus
from rollstream.streams.records import Applied, Partial, RolloutStatus, Trajectory
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import KeyedRecord, publish_all

log = logging.getLogger(__name__)

RECORDS_MAX = 1024  # `send` waits while so many records are queued or being appended
GATHER_S = 0.1  # pause between two rounds: records sent meanwhile share an append

OnPublished = Callable[[list[Address]], None]
"""Is called with the addresses of the records once they are durable, in the sender's thread."""


class RecordSender(Protocol):
    """Appends records to the log, now or later."""

    def send(
        self,
        topic: str,
        records: Sequence[KeyedRecord],
        on_published: OnPublished | None = None,
        is_urgent: bool = False,
    ) -> None:
        """Publish the records, in this order and behind earlier ones of the topic. May return
        before they are durable. Urgent ones are not held back to share an append with others.
        """
        ...

    def flush(self) -> None:
        """Return when all records sent before are durable."""
        ...


@dataclass(frozen=True, slots=True)
class _QueuedRecords:
    topic: str
    records: Sequence[KeyedRecord]
    on_published: OnPublished | None


class BackgroundSender:
    """Implements `RecordSender` with a thread, because over a network an acknowledgement takes
    longer than one poll of the engine. If an append fails, the thread ends, and every later call of
    `send` or `flush` raises its error.

    Queued records are lost if the process dies, as are tokens that the engine has not emitted yet.
    A caller may rely on a record only after `on_published` has received its address.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._changed = threading.Condition()
        self._waiting: list[_QueuedRecords] = []
        self._under_way: list[_QueuedRecords] = []
        self._failed: BaseException | None = None
        self._is_flushing = self._has_urgent = False
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def send(
        self,
        topic: str,
        records: Sequence[KeyedRecord],
        on_published: OnPublished | None = None,
        is_urgent: bool = False,
    ) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._count() < RECORDS_MAX)
            self._check()
            self._waiting.append(_QueuedRecords(topic, records, on_published))
            self._has_urgent = self._has_urgent or is_urgent
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed or not self._count())
            self._is_flushing = False
            self._check()

    def _count(self) -> int:
        return sum(len(queued.records) for queued in (*self._waiting, *self._under_way))

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    self._under_way, self._waiting = self._waiting, []
                    self._has_urgent = False
                self._post(self._under_way)
                with self._changed:
                    self._under_way = []
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: self._is_flushing or self._has_urgent, timeout=GATHER_S
                    )
        except Exception as error:
            log.exception("the rollout's records cannot be published")
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _post(self, letters: Sequence[_QueuedRecords]) -> None:
        """Publish with one append per topic, and call each `on_published`."""
        by_topic: dict[str, list[_QueuedRecords]] = {}
        for queued in letters:
            by_topic.setdefault(queued.topic, []).append(queued)
        for topic, together in by_topic.items():
            records = [record for queued in together for record in queued.records]
            addresses = publish_all(self._bus, topic, records)
            for queued in together:
                count = len(queued.records)
                if queued.on_published is not None:
                    queued.on_published(addresses[:count])
                addresses = addresses[count:]


@dataclass(frozen=True, slots=True)
class RolloutCondition:
    """Holds the fields of a status record (`RolloutStatus`) that do not come from the engine:
    `queued` trajectories wait outside of it, `quota_left` new ones may still start under the served
    `version`. `verified` is False from a comparison that found wrong tensors in the engine until
    they are repaired. `RolloutStatus` explains the other fields.
    """

    version: Version
    health: Health
    queued: int
    quota_left: int
    verified: bool
    pulling: bool = False
    versions: tuple[Version, ...] = ()
    parked: int = 0
    parked_max: int = 0


@dataclass(slots=True)
class RolloutPublisher:
    """Makes the records of one rollout under one term and passes them to `sender`, or the status to
    `heartbeat`; also counts what the metrics show. Use it from the rollout's loop only.
    """

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
    """The engine's B_max, the most rows at which one more is nearly free in a decode step; None:
    the number of its slots.
    """
    preemptible: bool = False
    """The machine may be taken away at any moment."""
    drafts: DraftStats = field(default_factory=DraftStats)
    """Draft statistics of the last heartbeat."""
    url: str = ""
    """Address of the rollout's endpoint for agents."""
    heartbeat: Heartbeat | None = None
    """Sends and repeats `status` in a thread beside the loop. None: `sender` sends it once."""

    def trajectories(self, done: Sequence[Trajectory]) -> None:
        """Publish finished trajectories and count them by finish once they are durable."""
        if done:
            finishes = [t.finish for t in done]
            records = [(str(t.group), t) for t in done]
            self.sender.send("trajectories", records, lambda _: self.finishes.update(finishes))

    def partials(self, running: Sequence[RunningTrajectory]) -> None:
        """Publish the partials that are due: a trajectory has `partial_tokens` new tokens, or any
        new tokens `partial_s` seconds after its previous partial.
        """
        now = self.clock()
        due = [each for each in running if each.has_unpublished() and self._is_due(each, now)]
        if not due:
            return
        self._send(due, [each.take_partial(self.name, self.term, now) for each in due])

    def episode(self, running: RunningTrajectory, on_durable: Callable[[], None]) -> None:
        """Publish at once what an episode of an agent gained: a turn, or its reward. `on_durable`
        is called in the sender's thread when the log has acknowledged it.
        """
        record = running.take_partial(self.name, self.term, self.clock())

        def on_published(addresses: list[Address]) -> None:
            running.partial_published(addresses[0])
            on_durable()

        self.sender.send("partials", [(record.trajectory, record)], on_published, is_urgent=True)

    def _send(self, due: Sequence[RunningTrajectory], records: Sequence[Partial]) -> None:
        entries: list[tuple[str, Partial]] = [(r.trajectory, r) for r in records]

        def on_published(addresses: list[Address]) -> None:
            for trajectory, address in zip(due, addresses, strict=True):
                trajectory.partial_published(address)

        self.sender.send("partials", entries, on_published)

    def give_up(self, running: Sequence[RunningTrajectory]) -> None:
        """Publish the last partial of these trajectories, which other rollouts may then resume. A
        trajectory whose previous partial is not durable yet is kept, and a later call publishes its
        last partial.
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
        """Publish that the engine serves a version. `verdict` is the result of comparing tensors of
        the version with those that the engine serves. The record holds the manifest's hash in place
        of one hash per tensor, because the fetch has checked each tensor against the manifest.
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
        """Publish a status record with the present load: the rollout's heartbeat."""
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
            versions=condition.versions,
            url=self.url,
            parked=condition.parked,
            parked_max=condition.parked_max,
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
        """Stop the heartbeat without waiting for its thread: the loop has ended, normally or by an
        error.
        """
        if self.heartbeat is not None:
            self.heartbeat.close()

    def _is_due(self, running: RunningTrajectory, now_s: float) -> bool:
        late = now_s - running.flushed_s >= self.settings.partial_s
        return late or running.unpublished >= self.settings.partial_tokens


FINISHES = ("stop", "length", "dead")  # how a trajectory can end


def rollout_metrics(
    publisher: RolloutPublisher, follower: WeightsFollower, judged: int, oldest_s: float
) -> MetricValues:
    """Return the rollout's metrics. `judged` is the number of trajectories that wait for a reward
    or for the environment's reply, `oldest_s` the age of the oldest running trajectory in seconds.
    """
    newest = follower.newest
    values: dict[str, MetricValue] = {
        "rollout_term": publisher.term,
        "rollout_trajectories_total": {name: publisher.finishes[name] for name in FINISHES},
        "rollout_rewards_outstanding": judged,
        "rollout_oldest_trajectory_age_seconds": max(0.0, oldest_s),
        "rollout_version_newest": 0 if newest is None else newest.version.number,
        "rollout_fetched_bytes_total": follower.fetched_bytes,
        "rollout_fetch_seconds": follower.fetch_s,
        "rollout_apply_seconds": publisher.apply_s,
    }
    values.update(_draft_metrics(publisher.drafts))
    if publisher.last_status is not None:
        values.update(_status_metrics(publisher.last_status))
    return values


def _draft_metrics(drafts: DraftStats) -> MetricValues:
    return {
        "rollout_draft_tokens_total": {"guessed": drafts.proposed, "right": drafts.accepted},
        "rollout_draft_lookups_total": {"asked": drafts.asked, "found": drafts.found},
        "rollout_draft_lookup_seconds_total": drafts.lookup_s,
        "rollout_draft_passes_total": drafts.passes,
        "rollout_draft_rows_total": drafts.rows,
        "rollout_draft_gained_tokens_total": drafts.gained,
        "rollout_draft_changes_total": drafts.changes,
    }


def _status_metrics(status: RolloutStatus) -> MetricValues:
    return {
        "rollout_slots": status.slots,
        "rollout_running": status.running,
        "rollout_waiting": status.waiting,
        "rollout_parked": status.parked,
        "rollout_kv_used_tokens": status.kv_used,
        "rollout_kv_capacity_tokens": status.kv_capacity,
        "rollout_version_held": status.version.number,
        "rollout_quota_left": status.quota_left,
        "rollout_health": {status.health: 1},
        "rollout_tokens_per_second": status.tokens_per_s,
        "rollout_tokens_generated_total": status.tokens_total,
        "rollout_idle_seconds_total": status.idle_s,
        "rollout_busy_seconds_total": status.busy_s,
    }
