"""The rollout worker: takes orders, generates, publishes; waits for nobody.

One loop of named phases. Each looks at what is there and returns; only decoding takes time.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from producers.engines.base import Emission, Engine, UpdateMode
from producers.rollout.chain import read_chain
from producers.rollout.growing import Growing
from producers.rollout.judging import Continued, Judging
from producers.rollout.orders import Orders
from producers.rollout.pulse import Health
from producers.rollout.tell import tell
from producers.rollout.update import Load, is_draining, may_draw, quota_left, wants_update
from producers.rollout.voice import Condition, Voice
from producers.rollout.weights import WeightsFollower
from producers.settings import RolloutSettings
from streams.errors import DecodeError, EngineRefused, PositionLost
from streams.figures import Figures
from streams.reader import TopicReader
from streams.records import Assignment, Trajectory

log = logging.getLogger(__name__)

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
    drawn: int = 0
    growing: dict[str, Growing] = field(default_factory=dict[str, Growing])
    done: list[Trajectory] = field(default_factory=list[Trajectory])

    def __post_init__(self) -> None:
        self.follower.prepare = self.engine.prepare

    def run(self, stop: threading.Event) -> None:
        """Generate until `stop`; then publish what is in progress as partials and say goodbye."""
        while not stop.is_set():
            self._take_orders()
            self._take_weights()
            self._start_waiting()
            began = time.perf_counter()
            emissions = self._generate()
            for emission in emissions:
                self._grow(emission)
            self._collect_judged()
            self._publish()
            if not emissions and time.perf_counter() - began < IDLE_S:  # nothing to decode
                stop.wait(IDLE_S)
        self.voice.farewell(self._unfinished())
        self._say("leaving")
        self.voice.sender.flush()

    # ---- phases --------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        """Drop what dispatch released, or give it up for another rollout; the rest waits in
        `orders`.
        """
        for released in self.orders.read():
            if released.onward:
                self._give_up(released)
                continue
            self.judging.forget(released.trajectory)
            if self.growing.pop(released.trajectory, None) is not None:
                self.engine.abort(released.trajectory)

    def _take_weights(self) -> None:
        """Swap to the newest version when the policy says so and its tensors are here, or to what
        repairs the engine; then some of it is compared with what is served.
        """
        self.follower.read()
        self._hear_verdict()
        mode: UpdateMode = self.settings.on_update
        if not self.follower.verified:
            self.follower.repair(keep=mode == "keep_version")
            mode = "in_flight_recompute"  # what the cache was made with is in doubt too
        elif not wants_update(mode, self.load()):
            return
        else:
            self.follower.prefetch(self.engine.version)
        fetched = self.follower.take()
        if fetched is None:
            return
        before = self.engine.version
        if fetched.announced.version <= before and not fetched.repairs:
            return
        started = time.perf_counter()
        self.engine.update(fetched.update, mode)
        self.follower.compare(fetched, self.engine.read_back, time.perf_counter() - started)
        self.drawn = 0 if self.engine.version != before else self.drawn
        self._say(self.health())

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
        once.
        """
        waiting = self.orders.waiting
        room = self.settings.slots + max(1, self.settings.slots // 8)
        while waiting and len(self.growing) < room:
            is_new = waiting[0].kind == "start"
            if is_new and not may_draw(self.settings.on_update, self.load()):
                return
            self._start(waiting.popleft())
            self.drawn += is_new

    def _start(self, order: Assignment) -> None:
        self.judging.forget(order.trajectory)  # an earlier attempt that dispatch gave up on
        if self.growing.pop(order.trajectory, None) is not None:
            self.engine.abort(order.trajectory)
        exact = self.settings.on_update == "keep_version" and order.kind == "resume"
        growing = Growing.begin(order, None, self.clock())
        try:
            if order.partial is not None:
                gained = read_chain(self.voice.bus, order.partial, order.trajectory)
                growing = Growing.begin(order, gained, self.clock())
            if exact and order.version != self.engine.version:
                # It swapped since dispatch looked: never resumed under another version.
                log.info("%s goes back: %s is gone here", order.trajectory, order.version)
                self.voice.give_up([growing])
                return
            self.engine.submit(growing.request(hold=self.judging.dialogue))
        except (EngineRefused, DecodeError, PositionLost) as error:
            log.warning("%s cannot be generated: %s", order.trajectory, error)
            self.done.append(self.judging.died(growing, f"engine: {error}"))
        else:
            self.growing[order.trajectory] = growing

    def _give_up(self, released: Assignment) -> None:
        """Hand one trajectory over; one whose turn is judged goes on, or ends, here: its completion
        is on its way. So does an order that is newer than what is asked for.
        """
        trajectory, attempt = released.trajectory, released.attempt
        waiting = self.orders.take(trajectory, attempt)
        if waiting is not None:
            self._start(waiting)
        growing = self.growing.get(trajectory)
        if growing is None or growing.order.attempt != attempt:
            return
        growing.leaving = True
        if not self.judging.has(trajectory):
            self._leave(growing)

    def _leave(self, growing: Growing) -> None:
        """Free its slot and publish what it has, unless it ended this moment."""
        emission = self.engine.abort(growing.order.trajectory)
        if emission is not None and emission.finish is not None:
            self._grow(emission)
            return
        if emission is not None:
            growing.extend(emission)
        del self.growing[growing.order.trajectory]
        self.voice.give_up([growing])

    def _generate(self) -> list[Emission]:
        """What `POLL_S` seconds of decoding gave."""
        emissions: list[Emission] = []
        deadline = time.perf_counter() + POLL_S
        while (
            self.growing and self.follower.verified and (rest := deadline - time.perf_counter()) > 0
        ):
            news = self.engine.poll(rest)
            if not news:  # idle, or the time is over
                break
            emissions += news
        return emissions

    def _grow(self, emission: Emission) -> None:
        growing = self.growing[emission.trajectory]
        growing.extend(emission)
        if emission.finish is not None:
            if not (self.judging.dialogue and emission.finish == "stop"):
                del self.growing[emission.trajectory]
            self.judging.ended(growing, emission.finish)

    def _collect_judged(self) -> None:
        """Finished trajectories are published; answered ones generate on in the slot that they
        kept.
        """
        for decided in self.judging.poll():
            if isinstance(decided, Continued):
                self._continue(decided)
                continue
            if self.growing.pop(decided.trajectory, None) is not None:
                self.engine.abort(decided.trajectory)  # its slot was held for the environment
            if decided.finish == "dead":
                log.warning("%s died: %s", decided.trajectory, decided.reason)
            self.done.append(decided)

    def _continue(self, decided: Continued) -> None:
        if (growing := self.growing[decided.trajectory]).leaving:
            self._leave(growing)
            return
        try:
            self.engine.append(decided.trajectory, decided.tokens)
        except (
            EngineRefused
        ) as error:  # the environment is the task's code: its mistake ends one sample
            growing = self.growing.pop(decided.trajectory)
            self.engine.abort(decided.trajectory)
            self.done.append(self.judging.died(growing, f"environment: {error}"))

    def _unfinished(self) -> list[Growing]:
        return [g for t, g in self.growing.items() if not self.judging.has(t)]

    def _publish(self) -> None:
        done, self.done = self.done, []
        self.voice.trajectories(done)
        self.voice.partials(self._unfinished())
        self.voice.give_up(())
        health = self.health()
        if self.voice.pulse.look(health, bool(self.growing), self.clock()):
            self._say(health)

    # ---- what it is ----------------------------------------------------------------------------

    def load(self) -> Load:
        """What the update rules look at."""
        waiting, newest = self.orders.waiting, self.follower.newest
        held = self.engine.version.number
        return Load(
            held=held,
            newest=held if newest is None else newest.version.number,
            drawn=self.drawn,
            quota=self.settings.quota or 2 * self.settings.slots,
            busy=len(self.growing),
            needed=waiting[0].version.number if waiting and waiting[0].kind == "start" else 0,
        )

    def figures(self) -> Figures:
        started = [growing.started_s for growing in list(self.growing.values())]
        oldest_s = self.clock() - min(started) if started else 0.0
        return tell(self.voice, self.follower, len(self.judging), oldest_s)

    def readers(self) -> list[TopicReader]:
        return [*self.orders.readers(), *self.follower.readers()]

    def health(self) -> Health:
        load = self.load()
        if not self.follower.verified:
            return "pulling"
        if is_draining(self.settings.on_update, load):
            return "draining" if load.busy else "pulling"
        return "generating"

    def _say(self, health: Health) -> None:
        quota = quota_left(self.settings.on_update, self.load())
        queued = len(self.orders.waiting)
        verified = self.follower.verified
        pulling = not verified or wants_update(self.settings.on_update, self.load())
        condition = Condition(self.engine.version, health, queued, quota, verified, pulling)
        self.voice.status(condition, self.engine.stats())
