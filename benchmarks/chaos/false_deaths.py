"""False deaths: a thousand busy simulated rollouts and a dispatch that stalls. Dispatch must take
no living rollout for dead, and must still find the dead ones.

Time is virtual. Records and log (in memory, not compacted, like the active segment of a broker),
the repeated heartbeats of a busy loop (`StatusRepeats`), and dispatch's readers, state and
judgement (`DispatchInbox`, `DispatchState`, `drop_silent_rollouts`) are the product's. Every
rollout stands still for 30 s at each version, all at about the same time; dispatch stands still for
2 to 12 s every few seconds; some rollouts die and some loops deadlock, also meanwhile.

`false_deaths` counts living rollouts that were dropped; its note gives the count under the earlier
rule: only an iterating loop sends a status, and dispatch judges after one read by its own clock.
`false_deaths_found` is the share of the dead that were dropped within the heartbeat's time-out
(deadlocked ones: within theirs) plus two heartbeats, counted in time during which dispatch ran.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace as with_fields

from msgspec.structs import replace

from benchmarks.case import Case, alone
from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.service import drop_silent_rollouts
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.producers.rollout.heartbeat import StatusRepeats
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import RolloutStatus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import publish_all
from testbed.memory import MemoryBus

ROLLOUTS = 1000
DEAD, STUCK = 30, 10
TICK_S, STATUS_S, TIMEOUT_S, STUCK_S = 0.1, 0.5, 10.0, 60.0
UPDATE_S, UPDATE_EVERY_S = 30.0, 50.0
STALL_S, CALM_S = (2.0, 12.0), (1.0, 8.0)


@dataclass(slots=True)
class Simulated:
    """One rollout: when it takes weights, and when it dies or its loop deadlocks."""

    name: str
    updates: Sequence[float]
    repeats: StatusRepeats
    dies_s: float = float("inf")
    sticks_s: float = float("inf")

    def status(self, now_s: float) -> RolloutStatus | None:
        """Returns the status that it sends now, if any."""
        if now_s >= self.dies_s:
            return None
        if now_s < self.sticks_s and not any(u <= now_s < u + UPDATE_S for u in self.updates):
            self.repeats.iterated_s = now_s
            if self.repeats.last is None or now_s - self.repeats.sent_s >= STATUS_S:
                record = replace(_FIRST, rollout=self.name, time_s=now_s)
                self.repeats.note_sent(record, now_s)
                return record
        elif self.repeats.wait_s(now_s) == 0.0:
            return self.repeats.repeat(now_s, now_s)
        return None


_FIRST = RolloutStatus(
    rollout="", term=1, slots=64, running=64, waiting=0, kv_used=1, kv_capacity=2,
    version=Version(0, 1), verified=True, health="generating", quota_left=0, tokens_per_s=1.0,
    tokens_total=0, idle_s=0.0, time_s=0.0,
)  # fmt: skip


@dataclass
class Simulation:
    """Rollouts and a dispatch on one virtual clock; `is_old` selects the earlier rule."""

    seed: int
    lasts_s: float
    is_old: bool = False
    now_s: float = 0.0
    false: int = 0
    found_s: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """By name, when the rollout was dropped: virtual time, and running time of dispatch."""
    ran_s: list[float] = field(default_factory=list[float])
    """For each tick, the running time of dispatch up to it."""

    def __post_init__(self) -> None:
        self.bus = MemoryBus(lambda: self.now_s)
        self.bus.create([with_fields(topic, cleanup="delete") for topic in catalogue()])
        self.state = DispatchState(stuck_timeout_s=STUCK_S)
        draw = self.draw = random.Random(self.seed)
        first = range(20, int(self.lasts_s), int(UPDATE_EVERY_S))
        self.rollouts = [
            Simulated(
                f"r{n}", [u + draw.uniform(0, 3) for u in first], StatusRepeats(STATUS_S, 0.0)
            )
            for n in range(ROLLOUTS)
        ]
        doomed = draw.sample(self.rollouts, DEAD + STUCK)
        for one in doomed[:DEAD]:
            one.dies_s = draw.uniform(5.0, self.lasts_s - 60.0)
        for one in doomed[DEAD:]:
            one.sticks_s = draw.uniform(5.0, self.lasts_s - STUCK_S - 60.0)
        self.inbox = DispatchInbox(self.bus, self.state, lambda: self.now_s, timeout_s=TIMEOUT_S)
        self.inbox.rebuild({topic: {0: -1} for topic in ("admissions", "assignments")}, {})
        self.reader = TopicReader(self.bus, "status", from_begin(self.bus, "status"))

    def run(self) -> None:
        ran_s, stalls_s, until_s = 0.0, 5.0, 0.0
        while self.now_s < self.lasts_s:
            self.now_s += TICK_S
            sent = (one.status(self.now_s) for one in self.rollouts)
            publish_all(self.bus, "status", [(f"{s.rollout}/1", s) for s in sent if s])
            if self.now_s >= stalls_s:
                until_s = self.now_s + self.draw.uniform(*STALL_S)
                stalls_s = until_s + self.draw.uniform(*CALM_S)
            if self.now_s >= until_s:
                ran_s += TICK_S
                self._look(ran_s)
            self.ran_s.append(ran_s)

    def late(self) -> list[str]:
        """Returns the dead and deadlocked rollouts that were dropped too late or never."""
        found: list[str] = []
        for one in self.rollouts:
            if one.dies_s < float("inf"):
                since_s, most_s = one.dies_s, TIMEOUT_S
            elif one.sticks_s < float("inf"):
                since_s, most_s = one.repeats.iterated_s, STUCK_S
            else:
                continue
            before_s = self.ran_s[int(since_s / TICK_S)]
            ran_s = self.found_s.get(one.name, (0.0, float("inf")))[1] - before_s
            if ran_s > most_s + 4 * STATUS_S:
                found.append(one.name)
        return found

    def waits(self) -> list[float]:
        """Returns, for each dead rollout that was dropped, the seconds since its death, stalls of
        dispatch included.
        """
        died = {one.name: one.dies_s for one in self.rollouts if one.dies_s < float("inf")}
        return sorted(
            self.found_s[name][0] - at for name, at in died.items() if name in self.found_s
        )

    def _look(self, ran_s: float) -> None:
        by_name = {one.name: one for one in self.rollouts}
        for name in self._judged():
            one = by_name[name]
            is_gone = self.now_s >= one.dies_s or self.now_s - one.repeats.iterated_s > STUCK_S
            self.false += not is_gone
            if is_gone:
                self.found_s.setdefault(name, (self.now_s, ran_s))

    def _judged(self) -> list[str]:
        if not self.is_old:
            self.inbox.read()
            return drop_silent_rollouts(self.state, self.inbox, TIMEOUT_S)
        for received in self.reader.follow():
            if isinstance(received.record, RolloutStatus) and not received.record.stalled_s:
                self.state.apply_status(received.record, self.now_s)
        return self.state.drop_rollouts(self.now_s - TIMEOUT_S)


def cases(quick: bool) -> Iterator[Case]:
    lasts_s = 180.0 if quick else 400.0
    now, before = Simulation(1, lasts_s), Simulation(1, lasts_s, is_old=True)
    for simulation in (now, before):
        simulation.run()
    note = (
        f"simulated: {ROLLOUTS} rollouts, {lasts_s:g} s, updates of {UPDATE_S:g} s, dispatch stood "
        f"still {1 - now.ran_s[-1] / lasts_s:.0%} of the time; the rule before: {before.false}"
    )
    yield alone("false_deaths", now.false, "rollouts", at_most=0, note=note)
    doomed, waits = DEAD + STUCK, now.waits()
    share = 1 - len(now.late()) / doomed
    note = (
        f"{DEAD} died, {STUCK} deadlocked; the dead after {waits[len(waits) // 2]:.1f} s (median), "
        f"{waits[-1]:.1f} s (longest), stalls of dispatch included"
        if waits
        else "none was found"
    )
    yield alone("false_deaths_found", share, "share", at_least=1.0, note=note)
