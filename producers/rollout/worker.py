"""The rollout worker: takes orders, generates, publishes; waits for nobody.

One loop of named phases. Each looks at what is there and returns; only decoding takes time. What it
has in progress is `work.py`'s.
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

POLL_S = 0.03  # decoding between two looks at orders, weights and rewards
IDLE_S = 0.02


@dataclass(slots=True)
class Rollout:
    """One rollout under one term, its engine serving a version already."""

    settings: RolloutSettings
    engine: Engine
    follower: WeightsFollower
    orders: Orders
    judging: Judging
    voice: Voice
    clock: Callable[[], float] = time.time
    timer: Callable[[], float] = time.perf_counter
    """For lengths of time, as `clock` is for moments."""
    sleep: Callable[[float], None] = time.sleep
    judged_s: float = 2.0
    """When it leaves, seconds for what is being judged."""
    keeping: Keeping | None = None
    """Its part in the history that its engine drafts from; None: it drafts from none."""
    drawn: int = 0
    passes: int = 0
    """Verification passes that it is known to have made."""
    work: Work = field(init=False)

    def __post_init__(self) -> None:
        self.follower.prepare = self.engine.prepare
        keep_version = self.settings.on_update == "keep_version"
        self.work = Work(self.engine, self.judging, self.voice, keep_version, self.clock)

    def run(self, stop: threading.Event) -> None:
        """Generate until `stop`; then publish what is in progress as partials and say goodbye.
        One that fails sends no further heartbeat.
        """
        try:
            while not stop.is_set():
                self._turn(stop)
            self._say_goodbye()
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
        """Drop what dispatch released, or give it up for another rollout; the rest waits in
        `orders`.
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
        """Swap to the newest version when the policy says so and its tensors are here, to the one
        from history that an order asks for, or to what repairs the engine; then some of it is
        compared with what is served.
        """
        self.follower.read()
        self._hear_verdict()
        mode: UpdateMode = self.settings.on_update
        asked = self._asked_from_history()
        if not self.follower.verified:
            self.follower.repair(keep=mode == "keep_version")
            mode = "in_flight_recompute"  # what the cache was made with is in doubt too
        elif asked is not None:
            self.follower.bring(asked)
        else:
            load = self.load()
            if is_draining(mode, load) and load.busy:
                self.follower.fetch_ahead(self.engine.version)
            if not wants_update(mode, load):
                return
            self.follower.prefetch(self.engine.version)  # what is here is taken, overtaken or not
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
        """The version that the next order waits for; only an empty engine takes it."""
        waiting = self.orders.waiting
        if not waiting or not waiting[0].from_history or self.work.growing:
            return None
        version = waiting[0].version
        return None if version in (self.engine.version, self.follower.gone) else version

    def _drawn_of(self, version: Version) -> int:
        """Of a version from history."""
        return drawn_from_history(self.load(), sum(o.version == version for o in self._resumes()))

    def _hear_verdict(self) -> None:
        """A version that was found to be served is told; one that is not ends serving."""
        verdict = self.follower.verdict()
        if verdict is None:
            return
        if not verdict.compared.differing:
            self.voice.applied(verdict)
        if verdict.compared.differing or verdict.fetched.repairs:
            self._say(self.health())

    def _start_waiting(self) -> None:
        """Submit orders while there is room and the policy lets new ones begin.

        A few more than there are slots, so that a slot freed in the middle of a poll is taken at
        once. Where the KV capacity binds no more than that wait in the engine: what has not begun
        belongs to no version yet.
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
        """What `POLL_S` seconds of decoding gave."""
        emissions: list[Emission] = []
        deadline, growing = self.timer() + POLL_S, self.work.growing
        while growing and self.follower.verified and (rest := deadline - self.timer()) > 0:
            news = self.engine.poll(rest)
            if not news:  # idle, or the time is over
                break
            emissions += news
        return emissions

    def _has_drafted(self) -> bool:
        """Since it was asked before."""
        before, self.passes = self.passes, self.engine.stats().drafts.passes
        return self.passes != before

    def _publish(self) -> None:
        self.work.publish()
        health = self.health()
        if self.voice.pulse.look(health, bool(self.work.growing), self.clock()):
            self._say(health)

    def _say_goodbye(self) -> None:
        """1. Everything in progress is given up.  2. Dispatch hears that nothing more is taken.
        3. What is judged ends here, if it does within `judged_s`.  4. Dispatch hears that nothing
        is left here: what was not finished goes on elsewhere.
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
        self.voice.sender.flush()  # its completions lie before the status that ends it
        self._say("leaving")  # 4
        if self.keeping is not None:
            self.keeping.conclude(self.voice.drafts)
        self.voice.conclude()

    # ---- what it is ----------------------------------------------------------------------------

    def load(self) -> Load:
        """What the update rules look at."""
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
