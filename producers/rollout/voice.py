"""All that a rollout publishes: trajectories, partials, status, applied versions.

At least once by design: first completions and chains decide (invariant 2), so nothing here needs to
know whether a dying predecessor managed to publish.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from producers.engines.base import DraftStats, EngineStats
from producers.rollout.growing import Growing
from producers.rollout.heartbeat import Heartbeat
from producers.rollout.outbox import Sender
from producers.rollout.pulse import Health, Pulse
from producers.rollout.weights import Verdict
from producers.settings import RolloutSettings
from streams.bus import Bus
from streams.figures import SECONDS, Tally
from streams.records import Address, Applied, Partial, RolloutStatus, Trajectory, Version


@dataclass(frozen=True, slots=True)
class Condition:
    """What a status says beside the engine's figures."""

    version: Version
    health: Health
    queued: int
    quota_left: int
    verified: bool
    pulling: bool = False


@dataclass(slots=True)
class Voice:
    """One rollout under one term."""

    bus: Bus
    sender: Sender
    name: str
    term: int
    settings: RolloutSettings
    pulse: Pulse
    clock: Callable[[], float] = time.time
    said: RolloutStatus | None = None
    finishes: Counter[str] = field(default_factory=Counter[str])
    apply_s: Tally = field(default_factory=lambda: Tally(SECONDS))
    _leaving: list[Growing] = field(default_factory=list[Growing])
    batch_max: int | None = None
    """B_max of the engine; None: its slots."""
    preemptible: bool = False
    """It may be taken away at any moment."""
    drafts: DraftStats = field(default_factory=DraftStats)
    """Those of the last heartbeat."""
    heartbeat: Heartbeat | None = None
    """Sends `status` beside the loop; None: `sender` does, and nothing is repeated."""

    def trajectories(self, done: Sequence[Trajectory]) -> None:
        if done:
            finishes = [t.finish for t in done]
            records = [(str(t.group), t) for t in done]
            self.sender.send("trajectories", records, lambda _: self.finishes.update(finishes))

    def partials(self, growing: Sequence[Growing]) -> None:
        """Publish what is due: `partial_tokens` new tokens, or new ones and `partial_s` seconds."""
        now = self.clock()
        due = [g for g in growing if g.has_news() and self._is_due(g, now)]
        if not due:
            return
        self._send(due, [g.take_partial(self.name, self.term, now) for g in due])

    def _send(self, due: Sequence[Growing], records: Sequence[Partial]) -> None:
        entries: list[tuple[str, Partial]] = [(r.trajectory, r) for r in records]

        def then(addresses: list[Address]) -> None:
            for one, at in zip(due, addresses, strict=True):
                one.landed(at)

        self.sender.send("partials", entries, then)

    def give_up(self, growing: Sequence[Growing]) -> None:
        """Publish what they gained as their last partials, each once its previous one has landed;
        called again for those.
        """
        self._leaving += growing
        due = [one for one in self._leaving if not one.flushing]
        self._leaving = [one for one in self._leaving if one.flushing]
        if due:
            now = self.clock()
            self._send(due, [g.take_partial(self.name, self.term, now, last=True) for g in due])

    def farewell(self) -> None:
        """All that was given up is durable when this returns."""
        self.sender.flush()
        self.give_up(())
        self.sender.flush()

    def applied(self, verdict: Verdict) -> None:
        """Tell who serves what: the manifest's hash stands for the hash of every tensor that was
        handed over, which each of them was compared with.
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

    def status(self, condition: Condition, stats: EngineStats) -> None:
        """Heartbeat and load."""
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
            tokens_per_s=self.pulse.said(condition.health, stats.tokens, now),
            tokens_total=stats.tokens,
            idle_s=self.pulse.idle_s,
            time_s=now,
            busy_s=stats.busy_s,
            kv_previous=self.pulse.kv_before(stats.kv_used, now),
            decode_batch_max=stats.slots if self.batch_max is None else self.batch_max,
            pulling=condition.pulling,
            queued=condition.queued,
            preemptible=self.preemptible,
        )
        if self.heartbeat is None:
            self.sender.send("status", [(f"{self.name}/{self.term}", record)])
        else:
            self.heartbeat.send(record)
        self.said, self.drafts = record, stats.drafts

    def turned(self) -> None:
        """The loop came round: it is not stalled."""
        if self.heartbeat is not None:
            self.heartbeat.turned()

    def conclude(self) -> None:
        """The last status is durable and no heartbeat follows it when this returns."""
        if self.heartbeat is not None:
            self.heartbeat.end()
        self.sender.flush()

    def close(self) -> None:
        """No more heartbeats: the loop has ended, however it did."""
        if self.heartbeat is not None:
            self.heartbeat.close()

    def _is_due(self, growing: Growing, now_s: float) -> bool:
        gained = growing.length - growing.flushed
        late = now_s - growing.flushed_s >= self.settings.partial_s
        return late or gained >= self.settings.partial_tokens
