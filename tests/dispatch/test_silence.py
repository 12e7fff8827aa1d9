"""Which rollouts dispatch takes for dead: those whose statuses it could have read and did not
find.
"""

import pytest

from rollstream.consumers.dispatch.inbox import STATUS_KEY_S, DispatchInbox
from rollstream.consumers.dispatch.service import drop_silent_rollouts
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.storage.terms import ROLLOUTS, RoleTerms, hold_name, next_term, role_names
from rollstream.streams.bus import Bus
from rollstream.streams.records import RolloutStatus
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import publish_all
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import status
from tests.support.hand_clock import HandClock

TIMEOUT_S = 10.0
STUCK_S = 300.0


class Judge:
    """Dispatch's state, its readers and its clock, over a log in memory."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.bus: Bus = MemoryBus(self.clock)
        self.bus.create(catalogue(2))
        self.state = DispatchState(stuck_timeout_s=STUCK_S)
        self.store: MemoryStore | None = None
        self.succeed()

    def succeed(self) -> None:
        """A new dispatch reads the log. With a store it knows the names that took terms there."""
        terms = None if self.store is None else RoleTerms(self.store, self.clock)
        self.inbox = DispatchInbox(
            self.bus, self.state, self.clock, timeout_s=TIMEOUT_S, terms=terms
        )
        own = {topic: {0: -1} for topic in ("admissions", "assignments")}
        self.inbox.rebuild(own, {})

    def send(self, *statuses: RolloutStatus) -> None:
        publish_all(self.bus, "status", [(f"{one.rollout}/{one.term}", one) for one in statuses])

    def look(self, after_s: float = 0.05) -> list[str]:
        """One round of dispatch, so long after the one before; returns the rollouts it drops."""
        self.clock.now_s += after_s
        left = self.state.departed()
        self.inbox.read()
        return drop_silent_rollouts(self.state, self.inbox, TIMEOUT_S, left)

    def keys(self) -> set[str]:
        """The keys that `status` keeps."""
        kept: dict[bytes, bytes | None] = {}
        for message in self.bus.read("status", self.bus.begin("status"), records_max=1 << 20):
            kept[message.key] = message.value
        return {key.decode() for key, value in kept.items() if value is not None}

    def silence(self, seconds: float, *speaking: str) -> None:
        """So many seconds of listening time, in steps of a quarter of the time-out."""
        for _ in range(round(seconds / (TIMEOUT_S / 4)) + 1):
            self.send(*map(status, speaking))
            self.look(TIMEOUT_S / 4)
            self.inbox.remove_silent_keys()

    def look_for(self, seconds: float, *speaking: str) -> list[str]:
        """Rounds of half a second, in each of which these rollouts send a status."""
        gone: list[str] = []
        for _ in range(round(2 * seconds)):
            self.send(*map(status, speaking))
            gone += self.look(0.5)
        return gone


@pytest.fixture
def judge() -> Judge:
    return Judge()


def test_after_a_stall_of_dispatch_no_living_rollout_is_silent(judge: Judge):
    """One read returns 512 of a thousand statuses."""
    names = [f"r{n}" for n in range(1000)]
    judge.send(*map(status, names))
    while judge.inbox.read()[0]:
        pass
    judge.send(*map(status, names))
    assert judge.look(after_s=12.0) == []
    assert judge.look() == judge.look() == []
    assert len(judge.state.rollouts) == 1000


def test_a_stall_of_everything_is_nobodys_silence(judge: Judge):
    """A laptop that slept: the first rollout that sends again is no evidence about the others."""
    judge.look_for(1, "a", "b")
    judge.send(status("a"))
    assert judge.look(after_s=3600.0) == []
    assert judge.look_for(5, "a", "b") == []


def test_while_no_rollout_is_heard_none_counts_as_silent(judge: Judge):
    """The broker was away; its clients reconnect one after the other."""
    judge.look_for(1, "a", "b")
    assert judge.look_for(60) == []
    assert judge.look_for(4, "a") == judge.look_for(4, "b") == []


def test_a_dead_rollout_is_found_within_the_timeout(judge: Judge):
    judge.look_for(1, "a", "b")
    assert judge.look_for(TIMEOUT_S - 1, "a") == []
    assert judge.look_for(2, "a") == ["b"]


def test_a_loop_that_is_busy_is_alive_and_one_that_is_stuck_is_not(judge: Judge):
    judge.look_for(1, "a", "b")
    judge.send(status("a", stalled_s=STUCK_S - 1))
    assert judge.look() == []
    judge.send(status("a", stalled_s=STUCK_S + 1))
    assert judge.look() == ["a"]
    judge.send(status("a", stalled_s=STUCK_S + 2))
    assert judge.look() == []
    assert "a" not in judge.state.rollouts, "it gets no orders while its loop stands"
    judge.send(status("a"))
    judge.look()
    assert "a" in judge.state.rollouts


def test_keys_of_the_dead_are_removed_from_status_and_a_zombie_brings_its_key_back(judge: Judge):
    judge.look_for(1, "a", "b", "c")
    judge.silence(STATUS_KEY_S - 5, "a")
    assert judge.keys() == {"a/1", "b/1", "c/1"}
    judge.send(status("c"))  # unread when the others' time is over
    judge.silence(10, "a")
    assert judge.keys() == {"a/1", "c/1"}
    judge.send(status("b"))  # a zombie that was stopped for all that time
    judge.look()
    assert judge.keys() == {"a/1", "b/1", "c/1"}
    assert "b" in judge.state.rollouts
    judge.silence(STATUS_KEY_S + 10, "a")
    assert judge.keys() == {"a/1"}


def test_the_next_dispatch_removes_keys_of_rollouts_that_died_before_it(judge: Judge):
    judge.look_for(1, "a", "b")
    judge.inbox = DispatchInbox(judge.bus, DispatchState(), judge.clock, timeout_s=TIMEOUT_S)
    judge.inbox.rebuild({topic: {0: -1} for topic in ("admissions", "assignments")}, {})
    judge.silence(STATUS_KEY_S + 10, "a")
    assert judge.keys() == {"a/1"}


@pytest.fixture
def named(judge: Judge) -> MemoryStore:
    """Rollouts a and b have taken their terms."""
    judge.store = MemoryStore()
    for name in ("a", "b"):
        next_term(judge.store, ROLLOUTS, name)
    judge.succeed()
    judge.look_for(2, "a", "b")
    return judge.store


def test_a_name_that_is_dead_for_long_leaves_the_store_too(judge: Judge, named: MemoryStore):
    judge.silence(STATUS_KEY_S - 5, "a")
    assert role_names(named, ROLLOUTS) == ["a", "b"]
    judge.silence(10, "a")
    assert role_names(named, ROLLOUTS) == ["a"]
    assert judge.keys() == {"a/1"}


def test_a_name_that_started_again_and_has_no_status_yet_stays(judge: Judge, named: MemoryStore):
    """Loading a large model takes minutes."""
    assert next_term(named, ROLLOUTS, "b") == 2
    judge.silence(STATUS_KEY_S + 10, "a")
    assert role_names(named, ROLLOUTS) == ["a", "b"]
    assert judge.keys() == {"a/1"}
    judge.send(status("b", term=2))
    judge.look(2.0)
    assert "b" in judge.state.rollouts


def test_a_rollout_that_was_cut_off_returns_once_it_holds_its_name(
    judge: Judge, named: MemoryStore
):
    judge.silence(STATUS_KEY_S + 10, "a")
    judge.send(status("b"))
    judge.look(2.0)
    assert "b" not in judge.state.rollouts
    hold_name(named, ROLLOUTS, "b")
    judge.send(status("b"))
    judge.look(2.0)
    assert "b" in judge.state.rollouts


def test_a_dispatch_that_dies_between_name_and_key_leaves_no_key(
    judge: Judge, named: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    judge.silence(STATUS_KEY_S - 5, "a")
    for _ in range(4):
        judge.send(status("a"))
        judge.look(TIMEOUT_S / 4)
    with monkeypatch.context() as broken:
        broken.setattr(judge.bus, "append", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            judge.inbox.remove_silent_keys()
    assert role_names(named, ROLLOUTS) == ["a"]
    assert judge.keys() == {"a/1", "b/1"}
    judge.succeed()
    judge.silence(STATUS_KEY_S + 10, "a")
    assert judge.keys() == {"a/1"}
