"""Publishes all records of a rollout and counts what its metrics show: `RolloutPublisher` makes
them, `BackgroundSender` appends them beside decoding.

A trajectory may be published twice, by this rollout and its dead predecessor: readers count the
first completion only (invariant 2), and resume only from the chain that an assignment names.

Reading list: after `producers/rollout/trajectory.py`, before `consumers/trainer/loop.py`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram
from rollstream.producers.engines.base import DraftStats, EngineStats
from rollstream.producers.rollout.heartbeat import Health, Heartbeat, StatusSchedule
from rollstream.producers.rollout.read_back import ReadBackResult
from rollstream.producers.rollout.sender import OnRefused, RecordSender
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.bus import Bus
from rollstream.streams.records import Applied, Partial, RolloutStatus, Trajectory
from rollstream.streams.values import Address, Version


@dataclass(slots=True)
class RolloutPublisher:
    """The records of one rollout under one term. For the rollout's loop only."""

    bus: Bus
    sender: RecordSender
    name: str
    term: int
    settings: RolloutSettings
    status_schedule: StatusSchedule
    clock: Callable[[], float] = time.time
    last_status: RolloutStatus | None = None
    finishes: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    """Records that the log cannot hold, by topic."""
    apply_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))
    _given_up: list[RunningTrajectory] = field(default_factory=list[RunningTrajectory])
    _refused: "deque[tuple[RunningTrajectory, str]]" = field(
        default_factory=lambda: deque[tuple[RunningTrajectory, str]]()
    )
    batch_max: int | None = None
    """The most rows at which one more is nearly free; None: the number of slots."""
    preemptible: bool = False
    """The machine may be taken away at any moment."""
    drafts: DraftStats = field(default_factory=DraftStats)
    url: str = ""
    """Address of the rollout's endpoint for agents."""
    heartbeat: Heartbeat | None = None
    """Sends and repeats `status` in a thread beside the loop. None: `sender` sends it once."""

    def trajectories(self, done: Sequence[Trajectory]) -> None:
        if done:
            finishes = [t.finish for t in done]
            records = [(str(t.group), t) for t in done]
            self.sender.send(
                "trajectories",
                records,
                lambda _: self.finishes.update(finishes),
                on_refused=self._counted("trajectories"),
            )

    def partials(self, running: Sequence[RunningTrajectory]) -> None:
        """Publish the due partials: of trajectories with `partial_tokens` new tokens, or with any
        `partial_s` seconds after the last one.
        """
        now = self.clock()
        due = [each for each in running if each.has_unpublished() and self._is_due(each, now)]
        if not due:
            return
        self._send(due, [each.take_partial(self.name, self.term, now) for each in due])

    def episode(
        self,
        running: RunningTrajectory,
        on_durable: Callable[[], None],
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Publish at once. The sender's thread calls `on_durable` once it is durable, or
        `on_refused` with the reason why the log cannot hold it, which ends the episode.
        """
        record = running.take_partial(self.name, self.term, self.clock())

        def on_published(addresses: list[Address]) -> None:
            running.partial_published(addresses[0])
            on_durable()

        def refuse(_: int, reason: str) -> None:
            self._refuse(running, reason)
            on_refused(reason)

        self.sender.send(
            "partials",
            [(record.trajectory, record)],
            on_published,
            is_urgent=True,
            on_refused=refuse,
        )

    def _refuse(self, running: RunningTrajectory, reason: str) -> None:
        # In the sender's thread.
        self.refused["partials"] += 1
        self._refused.append((running, reason))

    def _counted(self, topic: str) -> OnRefused:
        return lambda index, reason: self.refused.update([topic])

    def take_refused(self) -> list[tuple[RunningTrajectory, str]]:
        """Returns trajectories with a partial refused since the last call, and the reason: their
        chain cannot continue, so they end.
        """
        taken: list[tuple[RunningTrajectory, str]] = []
        while self._refused:
            taken.append(self._refused.popleft())
        return taken

    def _send(self, due: Sequence[RunningTrajectory], records: Sequence[Partial]) -> None:
        entries: list[tuple[str, Partial]] = [(r.trajectory, r) for r in records]
        published = dict(enumerate(due))

        def on_refused(index: int, reason: str) -> None:
            self._refuse(published.pop(index), reason)

        def on_published(addresses: list[Address]) -> None:
            for trajectory, address in zip(published.values(), addresses, strict=True):
                trajectory.partial_published(address)

        self.sender.send("partials", entries, on_published, on_refused=on_refused)

    def give_up(self, running: Sequence[RunningTrajectory]) -> None:
        """Publish the last partial, from which other rollouts may resume. If the previous one is
        not durable yet, a later call does it.
        """
        self._given_up += running
        due = [trajectory for trajectory in self._given_up if not trajectory.flushing]
        self._given_up = [trajectory for trajectory in self._given_up if trajectory.flushing]
        if due:
            now = self.clock()
            last = [
                trajectory.take_partial(self.name, self.term, now, last=True) for trajectory in due
            ]
            self._send(due, last)

    def flush_given_up(self) -> None:
        """Returns when the last partials of all given-up trajectories are durable."""
        self.sender.flush()
        self.give_up(())
        self.sender.flush()

    def applied(self, verdict: ReadBackResult) -> None:
        """Publish that the engine serves a version, after `verdict` compared its tensors."""
        announced, count = verdict.fetched.announced, verdict.compared.count
        # The manifest's hash stands for one hash per tensor: the fetch has checked each against it.
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
        self.sender.send("applied", [(self.name, record)], on_refused=self._counted("applied"))
        self.apply_s.add(verdict.seconds)

    def status(
        self,
        stats: EngineStats,
        *,
        version: Version,
        health: Health,
        queued: int,
        quota_left: int,
        verified: bool,
        pulling: bool,
        versions: tuple[Version, ...],
        parked: int,
        parked_max: int,
    ) -> None:
        """Publishes a heartbeat. `queued` trajectories wait outside of the engine; `verified` is
        False from a comparison that found wrong tensors until their repair.
        """
        now = self.clock()
        record = RolloutStatus(
            rollout=self.name,
            term=self.term,
            slots=stats.slots,
            running=stats.running,
            waiting=stats.waiting + queued,
            kv_used=stats.kv_used,
            kv_capacity=stats.kv_capacity,
            version=version,
            verified=verified,
            health=health,
            quota_left=quota_left,
            tokens_per_s=self.status_schedule.note_sent(health, stats.tokens, now),
            tokens_total=stats.tokens,
            idle_s=self.status_schedule.idle_s,
            time_s=now,
            busy_s=stats.busy_s,
            kv_previous=self.status_schedule.previous_kv(stats.kv_used, now),
            decode_batch_max=stats.slots if self.batch_max is None else self.batch_max,
            pulling=pulling,
            queued=queued,
            preemptible=self.preemptible,
            versions=versions,
            url=self.url,
            parked=parked,
            parked_max=parked_max,
        )
        if self.heartbeat is None:
            key = f"{self.name}/{self.term}"
            self.sender.send("status", [(key, record)], on_refused=self._counted("status"))
        else:
            self.heartbeat.send(record)
        self.last_status, self.drafts = record, stats.drafts

    def note_iteration(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.note_iteration()

    def end(self) -> None:
        """Returns when the last status is durable and no heartbeat can follow it."""
        if self.heartbeat is not None:
            self.heartbeat.end()
        self.sender.flush()

    def close(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.close()

    def _is_due(self, running: RunningTrajectory, now_s: float) -> bool:
        late = now_s - running.flushed_s >= self.settings.partial_s
        return late or running.unpublished >= self.settings.partial_tokens
