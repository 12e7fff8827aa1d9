"""Runs a rollout (`RolloutLoop`), which never waits for another role.

Each iteration takes assignments, takes weights, starts waiting trajectories, decodes for `POLL_S`
and publishes. A phase handles what has arrived and returns; only decoding takes time.

Reading list: after `consumers/dispatch/assignments.py`, before `producers/engines/base.py`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from rollstream.metric_values import MetricValues
from rollstream.producers.engines.base import DraftStats, UpdateMode
from rollstream.producers.rollout.assignments import (
    AssignmentQueue,
    UpdateInputs,
    is_draining,
    may_draw,
    quota_left,
    wants_update,
)
from rollstream.producers.rollout.heartbeat import Health
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.loop_metrics import rollout_metrics
from rollstream.producers.rollout.tail_filling import TailFilling
from rollstream.producers.rollout.turn_driver import RolloutParts, TurnDriver
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import Assignment
from rollstream.streams.values import Version

POLL_S = 0.03  # of decoding in one iteration
IDLE_S = 0.02  # pause of an iteration that has nothing to decode


class AnswerFeed(Protocol):
    def poll(self, drafts: bool = True) -> None:
        """Add what arrived in the log, a bounded amount; `drafts`: the engine drafted lately."""
        ...

    def readers(self) -> Sequence[TopicReader]: ...

    def close(self, drafts: DraftStats) -> None:
        """Leave the history; `drafts` are the engine's statistics."""
        ...


@dataclass(slots=True)
class RolloutLoop:
    """One rollout under one term. By `rollouts.on_update` a trajectory keeps the version it began
    with or takes new weights while it runs. The engine must serve a version before `run`.
    """

    follower: WeightsFollower
    assignments: AssignmentQueue
    in_progress: InProgress
    timer: Callable[[], float] = time.perf_counter
    """Measures durations; the driver's clock gives times of day."""
    sleep: Callable[[float], None] = time.sleep
    outcome_wait_s: float = 2.0
    """The longest time in which a leaving rollout awaits rewards and replies."""
    draft_feed: AnswerFeed | None = None
    """Fills the history that the engine drafts from; None: no drafts."""
    drawn: int = 0
    """New trajectories started under the held version, which `keep_version` limits."""
    filling: TailFilling = field(default_factory=TailFilling)
    """What was started beside a tail under the held version (`_fill_tail`)."""
    passes: int = 0
    """Draft verification passes of the engine at the last check."""

    def __post_init__(self) -> None:
        self.follower.prepare = self.parts.engine.prepare

    def run(self, stop: threading.Event) -> None:
        """Generate until `stop` is set, then hand over everything. After an error no further
        heartbeat follows, so dispatch drops the rollout.
        """
        try:
            while not stop.is_set():
                self._iterate(stop)
            self._leave()
        finally:
            self.parts.publisher.close()

    # ---- phases --------------------------------------------------------------------------------

    def _iterate(self, stop: threading.Event) -> None:
        self.parts.publisher.note_iteration()
        self.take_assignments()
        self.take_weights()
        self.start_waiting()
        if self.draft_feed is not None:
            self.draft_feed.poll(self._has_drafted())
        began = self.timer()
        has_generated = self.generate()
        self.in_progress.collect_outcomes()
        self.publish()
        if not has_generated and self.timer() - began < IDLE_S:  # nothing to decode
            stop.wait(IDLE_S)

    def take_assignments(self) -> None:
        """Read new assignments, of this term of the rollout's name alone. A released trajectory is
        dropped, or handed over if another rollout continues it; starts and resumes wait until
        `start_waiting`.
        """
        for released in self.assignments.read():
            if not released.onward:
                self.driver.drop(released.trajectory)
                continue
            waiting = self.assignments.remove(released.trajectory, released.attempt)
            if waiting is not None:  # to hand it over like a running one
                self.in_progress.start(waiting)
            self.in_progress.give_up(released)

    def take_weights(self) -> None:
        """Takes or fetches due weights: first the repair of wrong tensors, then the old version
        that the next assignment needs, then the newest one, when the rules allow it.
        """
        self.follower.read()
        self._take_verdict()
        mode: UpdateMode = self.parts.settings.on_update
        needed = self._version_from_history()
        if not self.follower.verified:
            self.follower.repair(keep=mode == "keep_version")
            mode = "in_flight_recompute"  # the cache was computed with the doubtful weights
        elif needed is not None:
            self.follower.fetch_version(needed)
        else:
            inputs = self._update_inputs()
            if is_draining(self._effective_mode, inputs) and inputs.busy:
                self.follower.fetch_ahead(self.parts.engine.version)
            if not wants_update(self._effective_mode, inputs):
                return
            # A version that is fetched already is taken, even if a newer one exists by now.
            self.follower.prefetch(self.parts.engine.version)
        fetched = self.follower.take()
        if fetched is None:
            return
        before, version = self.parts.engine.version, fetched.announced.version
        if version <= before and version != needed and not fetched.repairs:
            return
        started = self.timer()
        self.parts.engine.update(fetched.update, mode)
        self.follower.compare(fetched, self.parts.engine.read_back, self.timer() - started)
        if version != before:
            self.filling.started.clear()
            self.drawn = 0 if version != needed else self._drawn_of(version)
        self.send_status(self.health())

    def _version_from_history(self) -> Version | None:
        """Returns what the store must give before the next waiting assignment can start. None also
        if its fetch failed or it cannot be loaded yet.
        """
        waiting = self.assignments.waiting
        if not waiting:
            return None
        version = waiting[0].version
        if self._is_side_by_side:
            if waiting[0].kind == "start" or version in self.parts.engine.versions:
                return None
        # An engine that serves one version at a time must be empty first.
        elif not waiting[0].from_history or len(self.in_progress):
            return None
        return (
            None if version in (self.parts.engine.version, self.follower.unavailable) else version
        )

    def _drawn_of(self, version: Version) -> int:
        inputs = self._update_inputs()
        resumed = sum(assignment.version == version for assignment in self._resumes())
        # More than one version behind the newest, no new trajectory starts.
        return resumed if inputs.newest <= inputs.held + 1 else max(resumed, inputs.quota)

    def _take_verdict(self) -> None:
        verdict = self.follower.verdict()
        if verdict is None:
            return
        # After a mismatch nothing is generated until the repair, and `Applied` waits for it.
        if not verdict.compared.differing:
            self.parts.publisher.applied(verdict)
        if verdict.compared.differing or verdict.fetched.repairs:
            self.send_status(self.health())

    def start_waiting(self) -> None:
        """Submit waiting assignments in order, while the engine has room and the rules allow; a
        resume waits until its chain was read.

        Those that wait for their environment do not count, until `episodes_max` trajectories are
        open.
        """
        waiting, surplus = self.assignments.waiting, max(1, self.parts.settings.slots // 8)
        # An eighth more than the slots: one that becomes free while the engine decodes is filled at
        # once.
        room = self.parts.settings.slots + surplus
        # Where the KV cache is full before the slots are, the others may start under a newer
        # version.
        if waiting and self.parts.engine.stats().waiting >= surplus:
            return
        late = self.in_progress.read_chains_ahead(islice(waiting, self._startable(room)))
        if any(assignment.from_history for assignment in late):
            return
        self.assignments.put_last(late)  # others start meanwhile, but not in their slots
        while waiting and waiting[0] not in late and self._startable(room - len(late)):
            is_new = waiting[0].kind == "start"
            if is_new and not may_draw(self._effective_mode, self._update_inputs()):
                self._fill_tail()
                return
            if self._version_from_history() is not None:
                return
            self.in_progress.start(waiting.popleft())
            self.drawn += is_new

    def _startable(self, room: int) -> int:
        """Returns how many more trajectories the engine may get, of which `room` may run."""
        open_left = self.driver.open_max(room) - len(self.in_progress)
        return max(0, min(room - len(self.driver.running), open_left))

    def _fill_tail(self) -> None:
        inputs, waiting = self._update_inputs(), self.assignments.waiting
        running, slots = self.driver.running, self.parts.settings.slots
        # Dispatch assigns such starts only with `dispatch.fill_tails`.
        while chosen := self.filling.choose(waiting, inputs, running, slots):
            waiting.remove(chosen)
            self.in_progress.start(chosen)

    def generate(self) -> bool:
        """Decode for `POLL_S` seconds; without a running turn, wait for a program's request."""
        driver, deadline, has_generated = self.driver, self.timer() + POLL_S, False
        while (rest := deadline - self.timer()) > 0:
            driver.accept()
            if not (driver.running and self.follower.verified):
                if not driver.wait(min(rest, IDLE_S)):
                    break
                continue
            emissions = self.parts.engine.poll(min(rest, driver.poll_s))
            for emission in emissions:
                driver.grow(emission)
            if emissions:
                has_generated = True
            elif not driver.wait(0.0):  # the engine is idle, or the time is over
                break
        return has_generated

    def _has_drafted(self) -> bool:
        before, self.passes = self.passes, self.parts.engine.stats().drafts.passes
        return self.passes != before

    def publish(self) -> None:
        self.in_progress.publish()
        health = self.health()
        if self.parts.publisher.status_schedule.is_due(
            health, bool(self.driver.running), self.parts.clock()
        ):
            self.send_status(health)

    def _leave(self) -> None:
        """Leave in five steps.

        1. Hand over the running and the waiting trajectories, except those that wait for a reward.
        2. If there are such, publish `leaving`: dispatch assigns nothing more here.
        3. For `outcome_wait_s`, publish those whose reward arrives.
        4. Wait for the last comparison, so that `applied` has every version that matched.
        5. Publish `leaving` with nothing queued: dispatch resumes the rest elsewhere.
        """
        self.in_progress.give_up_all(self.assignments.waiting)  # 1
        self.driver.close()
        self.assignments.waiting.clear()
        self.parts.publisher.flush_given_up()
        deadline = self.timer() + self.outcome_wait_s
        if self.driver.awaited:
            self.send_status("leaving")  # 2
        while self.driver.awaited and self.timer() < deadline:
            self.parts.publisher.note_iteration()
            self.sleep(IDLE_S)
            self.in_progress.collect_outcomes()  # 3
            self.in_progress.publish()
        self.follower.await_verdict()
        self._take_verdict()  # 4
        self.in_progress.drop_all()
        self.parts.publisher.sender.flush()  # completions are durable before the last status
        self.send_status("leaving")  # 5
        if self.draft_feed is not None:
            self.draft_feed.close(self.parts.publisher.drafts)
        self.parts.publisher.end()

    # ---- state ---------------------------------------------------------------------------------

    @property
    def driver(self) -> TurnDriver:
        return self.in_progress.driver

    @property
    def parts(self) -> RolloutParts:
        return self.driver.parts

    @property
    def _is_side_by_side(self) -> bool:
        """Whether the engine serves several versions at once for `keep_version` (adapters)."""
        return self.parts.settings.on_update == "keep_version" and self.parts.engine.is_side_by_side

    @property
    def _effective_mode(self) -> UpdateMode:
        # With versions side by side no trajectory has to end before a new version is taken.
        return "in_flight" if self._is_side_by_side else self.parts.settings.on_update

    def _update_inputs(self) -> UpdateInputs:
        waiting, newest = self.assignments.waiting, self.follower.newest
        served = self.parts.engine.version
        resumes = sum(assignment.version == served for assignment in self._resumes())
        return UpdateInputs(
            held=served.number,
            newest=served.number if newest is None else newest.version.number,
            drawn=self.drawn,
            quota=self.parts.settings.quota or 2 * self.parts.settings.slots,
            busy=len(self.in_progress) + resumes,
            needed=waiting[0].version.number if waiting and waiting[0].kind == "start" else 0,
        )

    def _resumes(self) -> list[Assignment]:
        return [
            assignment for assignment in self.assignments.waiting if assignment.kind == "resume"
        ]

    def metric_values(self) -> MetricValues:
        trajectories = [*self.driver.running.values(), *self.driver.parked.values()]
        started = [running.started_s for running in trajectories]
        oldest_s = self.parts.clock() - min(started) if started else 0.0
        return {
            **rollout_metrics(self.parts.publisher, self.follower, self.driver.awaited, oldest_s),
            "rollout_chains_broken_total": self.in_progress.broken_chains,
            **self.driver.metric_values(),
        }

    def readers(self) -> list[TopicReader]:
        feed = self.draft_feed
        drafted: Sequence[TopicReader] = () if feed is None else feed.readers()
        return [*self.assignments.readers(), *self.follower.readers(), *drafted]

    def health(self) -> Health:
        """`draining`: it finishes its trajectories before it takes a newer version; `pulling`: it
        cannot generate before it has other weights.
        """
        inputs = self._update_inputs()
        loads = self._version_from_history() is not None and not self._is_side_by_side
        if not self.follower.verified or loads:
            return "pulling"
        if is_draining(self._effective_mode, inputs):
            return "draining" if inputs.busy else "pulling"
        return "generating"

    def send_status(self, health: Health) -> None:
        inputs, verified = self._update_inputs(), self.follower.verified
        pulling = not verified or wants_update(self._effective_mode, inputs)
        self.parts.publisher.status(
            self.parts.engine.stats(),
            version=self.parts.engine.version,
            health=health,
            queued=len(self.assignments.waiting)
            + (self.driver.awaited if health == "leaving" else 0),
            quota_left=quota_left(self._effective_mode, inputs),
            verified=verified,
            pulling=pulling or self._version_from_history() is not None,
            versions=tuple(self.parts.engine.versions) if self._is_side_by_side else (),
            parked=len(self.driver.parked),
            parked_max=self.driver.parked_max,
        )
