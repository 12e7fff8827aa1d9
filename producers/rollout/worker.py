"""The rollout worker: takes orders, generates, publishes trajectories, partials and status; waits
for nobody.

One loop of named phases. Each phase looks at what is there and returns; only the engine's decoding
takes time. What it publishes is at least once by design: first completions and chains decide
(invariant 2), so nothing here needs to know whether a dying predecessor managed to publish.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from streams.writer import publish

from producers.engines.base import Emission, Engine
from producers.rewards import RewardPool, Verdict
from producers.rollout.chain import Gained, read_chain
from producers.rollout.growing import Growing
from producers.rollout.orders import Orders
from producers.rollout.pulse import Health, Pulse
from producers.rollout.update import Load, is_draining, may_draw, quota_left, wants_update
from producers.rollout.weights import Fetched, WeightsFollower
from producers.settings import RolloutSettings
from streams.bus import Bus
from streams.errors import EngineRefused
from streams.records import (
    Applied,
    Assignment,
    Partial,
    RolloutStatus,
    Trajectory,
    Version,
)

log = logging.getLogger(__name__)

POLL_S = 0.02  # decoding between two looks at orders, weights and rewards
IDLE_S = 0.005


@dataclass(slots=True)
class Rollout:
    """One rollout under one term. `engine` serves `fetched`'s version when this is made."""

    name: str
    term: int
    bus: Bus
    settings: RolloutSettings
    engine: Engine
    follower: WeightsFollower
    rewards: RewardPool
    orders: Orders
    pulse: Pulse
    clock: Callable[[], float] = time.time
    growing: dict[str, Growing] = field(default_factory=dict[str, Growing])
    judged: dict[str, tuple[Growing, str]] = field(default_factory=dict[str, tuple[Growing, str]])
    drawn: int = 0
    done: list[Trajectory] = field(default_factory=list[Trajectory])

    def run(self, stop: threading.Event) -> None:
        """Generate until `stop`; then flush what is in progress as partials and say goodbye."""
        while not stop.is_set():
            self._take_orders()
            self._take_weights()
            self._start_waiting()
            emissions = self._generate()
            for emission in emissions:
                self._grow(emission)
            self._collect_verdicts()
            self._publish(emptied=False)
            if self.pulse.look(self.health(), bool(self.growing), self.clock()):
                self.say_status(self.health())
            if not (emissions or self.growing):
                stop.wait(IDLE_S)
        self._publish(emptied=True)
        self.say_status("leaving")

    # ---- phases ----------------------------------------------------------------------------------
    # --------------

    def _take_orders(self) -> None:
        """Drop what dispatch released; the rest waits in `orders`."""
        for released in self.orders.read():
            self.judged.pop(released.trajectory, None)
            if self.growing.pop(released.trajectory, None) is not None:
                self.engine.abort(released.trajectory)

    def _take_weights(self) -> None:
        """Swap to the newest version when the policy says so and its tensors are here."""
        self.follower.read()
        if not wants_update(self.settings.on_update, self.load()):
            return
        self.follower.prefetch(self.engine.version)
        fetched = self.follower.take()
        if fetched is None or fetched.announced.version <= self.engine.version:
            return
        started = time.perf_counter()
        self.engine.update(fetched.announced.version, fetched.tensors, self.settings.on_update)
        self.drawn = 0
        self.say_applied(fetched, time.perf_counter() - started)
        self.say_status(self.health())

    def _start_waiting(self) -> None:
        """Submit orders while slots are free and the policy lets new ones begin."""
        waiting = self.orders.waiting
        while waiting and len(self.growing) < self.settings.slots + self._queued_max():
            order = waiting[0]
            if order.kind == "start" and not may_draw(self.settings.on_update, self.load()):
                return
            waiting.popleft()
            self._start(order)

    def _queued_max(self) -> int:
        """Requests queued inside the engine, so that a slot freed in the middle of a poll is taken
        at once.
        """
        return max(1, self.settings.slots // 8)

    def _start(self, order: Assignment) -> None:
        gained: Gained | None = None
        if order.partial is not None:
            gained = read_chain(self.bus, order.partial, order.trajectory)
        growing = Growing.begin(order, gained, self.clock())
        self.drawn += order.kind == "start"
        try:
            self.engine.submit(growing.request(hold=False))
        except EngineRefused as error:
            self._died(growing, f"engine: {error}")
            return
        self.growing[order.trajectory] = growing

    def _generate(self) -> list[Emission]:
        emissions: list[Emission] = []
        deadline = time.perf_counter() + POLL_S
        while self.growing and (rest := deadline - time.perf_counter()) > 0:
            news = self.engine.poll(rest)
            if not news:  # idle, or the time is over
                break
            emissions += news
        return emissions

    def _grow(self, emission: Emission) -> None:
        growing = self.growing[emission.trajectory]
        growing.extend(emission)
        if emission.finish is None:
            return
        del self.growing[emission.trajectory]
        self.judged[emission.trajectory] = (growing, emission.finish)
        self.rewards.submit(
            emission.trajectory, growing.order.reference, growing.response(), emission.finish
        )

    def _collect_verdicts(self) -> None:
        for trajectory, verdict in self.rewards.poll():
            judged = self.judged.pop(trajectory, None)
            if judged is not None:  # released meanwhile
                self._finish(*judged, verdict)

    def _finish(self, growing: Growing, finish: str, verdict: Verdict) -> None:
        if verdict.reason:
            self._died(growing, f"reward: {verdict.reason}")
            return
        self.done.append(
            growing.finished(
                self.term,
                "stop" if finish == "stop" else "length",
                self.clock(),
                self.newest(),
                verdict.reward,
                verdict.scores,
            )
        )

    def _died(self, growing: Growing, reason: str) -> None:
        """A failure is a completion that says so (invariant 2)."""
        log.warning("%s died: %s", growing.order.trajectory, reason)
        self.done.append(
            growing.finished(self.term, "dead", self.clock(), self.newest(), reason=reason)
        )

    def _publish(self, emptied: bool) -> None:
        """Trajectories first, then the partials that are due (all of them when it leaves)."""
        if self.done:
            done, self.done = self.done, []
            publish(self.bus, "trajectories", [(str(t.group), t) for t in done])
        now = self.clock()
        due = [g for g in self.growing.values() if emptied or self._is_due(g, now)]
        due = [g for g in due if g.length > g.flushed]
        if not due:
            return
        records = [g.take_partial(self.name, self.term, now) for g in due]
        entries: list[tuple[str, Partial]] = [(r.trajectory, r) for r in records]
        for growing, at in zip(due, publish(self.bus, "partials", entries), strict=True):
            growing.partial = at

    def _is_due(self, growing: Growing, now_s: float) -> bool:
        gained = growing.length - growing.flushed
        return gained >= self.settings.partial_tokens or (
            gained > 0 and now_s - growing.flushed_s >= self.settings.partial_s
        )

    # ---- what it is
    # --------------------------------------------------------------------------------------------

    def newest(self) -> Version:
        announced = self.follower.newest
        return self.engine.version if announced is None else announced.version

    def load(self) -> Load:
        """What the update rules look at."""
        waiting = self.orders.waiting
        return Load(
            held=self.engine.version.number,
            newest=self.newest().number,
            drawn=self.drawn,
            quota=self.settings.quota or 2 * self.settings.slots,
            busy=len(self.growing),
            needed=waiting[0].version.number if waiting and waiting[0].kind == "start" else 0,
        )

    def health(self) -> Health:
        load = self.load()
        if is_draining(self.settings.on_update, load):
            return "draining" if load.busy else "pulling"
        return "generating"

    def say_status(self, health: Health) -> None:
        """Heartbeat and load (`status`)."""
        stats, now = self.engine.stats(), self.clock()
        record = RolloutStatus(
            rollout=self.name,
            term=self.term,
            slots=stats.slots,
            running=stats.running,
            waiting=stats.waiting + len(self.orders.waiting),
            kv_used=stats.kv_used,
            kv_capacity=stats.kv_capacity,
            version=self.engine.version,
            verified=True,
            health=health,
            quota_left=quota_left(self.settings.on_update, self.load()),
            tokens_per_s=self.pulse.said(health, stats.tokens, now),
            tokens_total=stats.tokens,
            idle_s=self.pulse.idle_s,
            time_s=now,
        )
        publish(self.bus, "status", [(f"{self.name}/{self.term}", record)])

    def say_applied(self, fetched: Fetched, seconds: float) -> None:
        """Tell who serves what (`applied`)."""
        announced = fetched.announced
        record = Applied(
            rollout=self.name,
            rollout_term=self.term,
            version=announced.version,
            hash=announced.manifest_hash,
            checked="hashes",
            tensors=len(fetched.tensors),
            seconds=seconds,
            time_s=self.clock(),
        )
        publish(self.bus, "applied", [(self.name, record)])
