"""The rollout worker: takes assignments, generates, publishes, and never blocks on another role.

One loop of named phases. Each phase handles what has arrived and returns; only decoding takes time.
`work.py` has the trajectories in progress.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from producers.engines.base import Emission, Engine, UpdateMode
from producers.rollout.judging import Judging
from producers.rollout.keeping import Keeping
from producers.rollout.orders import Orders
from producers.rollout.pulse import Health
from producers.rollout.tell import tell
from producers.rollout.update import (
    Load,
    drawn_from_history,
    is_draining,
    may_draw,
    quota_left,
    wants_update,
)
from producers.rollout.voice import Condition, Voice
from producers.rollout.weights import WeightsFollower
from producers.rollout.work import Work
from producers.settings import RolloutSettings
from streams.figures import Figures
from streams.reader import TopicReader
from streams.records import Assignment, Version

POLL_S = 0.03  # decoding between two polls of assignments, weights and rewards
IDLE_S = 0.02


@dataclass(slots=True)
class Rollout:
    """One rollout under one term. Its engine serves a version already."""

    settings: RolloutSettings
    engine: Engine
    follower: WeightsFollower
    orders: Orders
    judging: Judging
    voice: Voice
    clock: Callable[[], float] = time.time
    timer: Callable[[], float] = time.perf_counter
    """For durations, as `clock` is for times of day."""
    sleep: Callable[[float], None] = time.sleep
    judged_s: float = 2.0
    """Seconds that a leaving rollout waits for rewards and replies."""
    keeping: Keeping | None = None
    """Fills the history that the engine drafts from; None: no drafts."""
    drawn: int = 0
    passes: int = 0
    """Verification passes at the last check."""
    work: Work = field(init=False)

    def __post_init__(self) -> None:
        self.follower.prepare = self.engine.prepare
        keep_version = self.settings.on_update == "keep_version"
        self.work = Work(self.engine, self.judging, self.voice, keep_version, self.clock)

    def run(self, stop: threading.Event) -> None:
        """Generate until `stop`, then publish everything in progress as partials and leave. A
        rollout that fails sends no further heartbeat.
        """
        try:
            while not stop.is_set():
                self._turn(stop)
            self._leave()
        finally:
            self.voice.close()

    # ---- phases --------------------------------------------------------------------------------

    def _turn(self, stop: threading.Event) -> None:
        self.voice.turned()
        self._take_orders()
        self._take_weights()
        self._start_waiting()
        if self.keeping is not None:
            self.keeping.look(self._has_drafted())
        began = self.timer()
        emissions = self._generate()
        for emission in emissions:
            self.work.grow(emission)
        self.work.collect_judged()
        self._publish()
        if not emissions and self.timer() - began < IDLE_S:  # nothing to decode
            stop.wait(IDLE_S)

    def _take_orders(self) -> None:
        """Drop what dispatch released, or hand it over to another rollout; start and resume
        assignments wait in `orders`.
        """
        for released in self.orders.read():
            if not released.onward:
                self.work.drop(released.trajectory)
                continue
            waiting = self.orders.take(released.trajectory, released.attempt)
            if waiting is not None:
                self.work.start(waiting)
            self.work.give_up(released)

    def _take_weights(self) -> None:
        """Swap to the version that is due: the newest one when the policy allows it and its tensors
        are fetched, the version from history that an assignment needs, or the repair of wrong
        tensors. Then start to compare some tensors with what the engine serves.
        """
        self.follower.read()
        self._take_verdict()
        mode: UpdateMode = self.settings.on_update
        asked = self._asked_from_history()
        if not self.follower.verified:
            self.follower.repair(keep=mode == "keep_version")
            mode = "in_flight_recompute"  # the cache was computed with the doubtful weights
        elif asked is not None:
            self.follower.bring(asked)
        else:
            load = self.load()
            if is_draining(mode, load) and load.busy:
                self.follower.fetch_ahead(self.engine.version)
            if not wants_update(mode, load):
                return
            self.follower.prefetch(
                self.engine.version
            )  # a fetched version is taken even if a newer one exists
        fetched = self.follower.take()
        if fetched is None:
            return
        before, version = self.engine.version, fetched.announced.version
        if version <= before and version != asked and not fetched.repairs:
            return
        started = self.timer()
        self.engine.update(fetched.update, mode)
        self.follower.compare(fetched, self.engine.read_back, self.timer() - started)
        if version != before:
            self.drawn = 0 if version != asked else self._drawn_of(version)
        self._say(self.health())

    def _asked_from_history(self) -> Version | None:
        """The version from history that the next assignment waits for. Only an empty engine loads
        it.
        """
        waiting = self.orders.waiting
        if not waiting or not waiting[0].from_history or self.work.growing:
            return None
        version = waiting[0].version
        return None if version in (self.engine.version, self.follower.gone) else version

    def _drawn_of(self, version: Version) -> int:
        """Trajectories that count as drawn under a version from history."""
        return drawn_from_history(self.load(), sum(o.version == version for o in self._resumes()))

    def _take_verdict(self) -> None:
        """Publish that a version is served once its comparison matched. After a mismatch the
        rollout stops serving.
        """
        verdict = self.follower.verdict()
        if verdict is None:
            return
        if not verdict.compared.differing:
            self.voice.applied(verdict)
        if verdict.compared.differing or verdict.fetched.repairs:
            self._say(self.health())

    def _start_waiting(self) -> None:
        """Submit assignments while there is room and the policy allows new trajectories.

        The engine gets an eighth more than it has slots, so that a slot freed in the middle of a
        poll is filled at once. Where the KV capacity is the limit, no more than that wait in the
        engine, because what has not started belongs to no version yet.
        """
        waiting, few = self.orders.waiting, max(1, self.settings.slots // 8)
        room = self.settings.slots + few
        if waiting and self.engine.stats().waiting >= few:
            return
        self.work.read_ahead(islice(waiting, max(0, room - len(self.work.growing))))
        while waiting and len(self.work.growing) < room:
            is_new = waiting[0].kind == "start"
            if is_new and not may_draw(self.settings.on_update, self.load()):
                return
            if self._asked_from_history() is not None:
                return
            self.work.start(waiting.popleft())
            self.drawn += is_new

    def _generate(self) -> list[Emission]:
        """The emissions of `POLL_S` seconds of decoding."""
        emissions: list[Emission] = []
        deadline, growing = self.timer() + POLL_S, self.work.growing
        while growing and self.follower.verified and (rest := deadline - self.timer()) > 0:
            news = self.engine.poll(rest)
            if not news:  # the engine is idle, or the time is over
                break
            emissions += news
        return emissions

    def _has_drafted(self) -> bool:
        """Whether the engine verified drafts since the last call."""
        before, self.passes = self.passes, self.engine.stats().drafts.passes
        return self.passes != before

    def _publish(self) -> None:
        self.work.publish()
        health = self.health()
        if self.voice.pulse.look(health, bool(self.work.growing), self.clock()):
            self._say(health)

    def _leave(self) -> None:
        """Leave in four steps.

        1. Hand over everything in progress. 2. Publish `leaving`: dispatch assigns nothing more. 3.
        Publish trajectories whose reward arrives within `judged_s`. 4. Publish `leaving` with
        nothing queued: dispatch resumes the rest elsewhere.
        """
        self.work.give_up_all(self.orders.waiting)  # 1
        self.orders.waiting.clear()
        self.voice.farewell()
        deadline = self.timer() + self.judged_s
        if len(self.judging):
            self._say("leaving")  # 2
        while len(self.judging) and self.timer() < deadline:
            self.voice.turned()
            self.sleep(IDLE_S)
            self.work.collect_judged()  # 3
            self.work.publish()
        self.work.forget_all()
        self.voice.sender.flush()  # completions are durable before the status that ends the rollout
        self._say("leaving")  # 4
        if self.keeping is not None:
            self.keeping.conclude(self.voice.drafts)
        self.voice.conclude()

    # ---- state ---------------------------------------------------------------------------------

    def load(self) -> Load:
        """The inputs of the update rules."""
        waiting, newest = self.orders.waiting, self.follower.newest
        held = self.engine.version
        mine = sum(order.version == held for order in self._resumes())
        return Load(
            held=held.number,
            newest=held.number if newest is None else newest.version.number,
            drawn=self.drawn,
            quota=self.settings.quota or 2 * self.settings.slots,
            busy=len(self.work.growing) + mine,
            needed=waiting[0].version.number if waiting and waiting[0].kind == "start" else 0,
        )

    def _resumes(self) -> list[Assignment]:
        return [order for order in self.orders.waiting if order.kind == "resume"]

    def figures(self) -> Figures:
        started = [growing.started_s for growing in list(self.work.growing.values())]
        oldest_s = self.clock() - min(started) if started else 0.0
        broken = {"rollout_chains_broken_total": self.work.broken}
        return {**tell(self.voice, self.follower, len(self.judging), oldest_s), **broken}

    def readers(self) -> list[TopicReader]:
        more = [] if self.keeping is None else self.keeping.readers()
        return [*self.orders.readers(), *self.follower.readers(), *more]

    def health(self) -> Health:
        load = self.load()
        if not self.follower.verified or self._asked_from_history() is not None:
            return "pulling"
        if is_draining(self.settings.on_update, load):
            return "draining" if load.busy else "pulling"
        return "generating"

    def _say(self, health: Health) -> None:
        load, verified = self.load(), self.follower.verified
        pulling = not verified or wants_update(self.settings.on_update, load)
        condition = Condition(
            version=self.engine.version,
            health=health,
            queued=len(self.orders.waiting) + (len(self.judging) if health == "leaving" else 0),
            quota_left=quota_left(self.settings.on_update, load),
            verified=verified,
            pulling=pulling or self._asked_from_history() is not None,
        )
        self.voice.status(condition, self.engine.stats())
