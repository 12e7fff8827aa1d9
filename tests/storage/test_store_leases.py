"""Leases and terms: which process may take a role, and when."""

import heapq
import itertools
import random
import subprocess
import sys
import threading

import pytest

from rollstream.errors import CorruptObject, Fenced, LeaseHeld, StoreError
from rollstream.storage.lease_renewal import LeaseRenewal, renew_once
from rollstream.storage.leases import LeaseCandidate, LeaseClaim, acquire_lease, may_take
from rollstream.storage.terms import (
    STARTS,
    RoleRecord,
    RoleTerms,
    hold_name,
    next_term,
    read_role,
    restarts_of,
    role_key,
    role_names,
)
from testbed.memory import MemoryStore
from testbed.waiting import WAIT_S
from tests.storage.storage_samples import in_threads


class Clock:
    """Monotonic time that advances only through sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def candidate(name, handed=None, duration_s=10.0):
    return LeaseCandidate("trainer", name, f"nonce-{name}", duration_s, handed)


def test_a_new_role_starts_at_term_1(store):
    lease = acquire_lease(store, candidate("a"), wait_s=0)
    assert lease.term == 1
    record, _ = read_role(store, "trainer")  # pyright: ignore[reportGeneralTypeIssues]
    assert record == RoleRecord("trainer", 1, "a", "nonce-a", 0, 10.0, False)


def test_a_lease_is_taken_only_after_its_duration_unchanged_on_the_own_clock(store):
    acquire_lease(store, candidate("a"), wait_s=0)
    clock = Clock()
    claim = LeaseClaim(store, candidate("b"), clock)
    for _ in range(10):
        assert claim.attempt() is None
        clock.sleep(0.99)
    clock.sleep(0.11)
    assert claim.attempt().term == 2  # pyright: ignore[reportOptionalMemberAccess]


def test_a_renewal_starts_the_wait_again(store):
    lease = acquire_lease(store, candidate("a"), wait_s=0)
    clock = Clock()
    claim = LeaseClaim(store, candidate("b"), clock)
    for _ in range(5):
        assert claim.attempt() is None
        clock.sleep(9.0)
        lease.renew()
    assert claim.attempt() is None
    assert read_role(store, "trainer")[0].renewals == 5  # pyright: ignore[reportOptionalSubscript]


def test_the_duration_that_counts_is_the_holders(store):
    acquire_lease(store, candidate("a", duration_s=30.0), wait_s=0)
    clock = Clock()
    with pytest.raises(LeaseHeld, match=r"held by a \(term 1\)"):
        acquire_lease(store, candidate("b", duration_s=1.0), 29.0, clock, clock.sleep)
    assert acquire_lease(store, candidate("b"), 31.0, clock, clock.sleep).term == 2


def test_a_released_lease_is_taken_at_once_under_the_next_term(store):
    lease = acquire_lease(store, candidate("a"), wait_s=0)
    lease.release()
    lease.release()
    assert acquire_lease(store, candidate("b"), wait_s=0).term == 2


def test_the_nonce_of_the_reaped_holder_opens_its_lease_at_once(store):
    dead = acquire_lease(store, candidate("a"), wait_s=0)
    assert acquire_lease(store, candidate("b", handed=dead.nonce), wait_s=0).term == 2
    with pytest.raises(LeaseHeld):
        acquire_lease(store, candidate("c", handed=dead.nonce), wait_s=0)


def test_a_zombie_is_fenced_at_its_next_renewal_and_at_release(store):
    zombie = acquire_lease(store, candidate("a"), wait_s=0)
    acquire_lease(store, candidate("b", handed=zombie.nonce), wait_s=0)
    for step in (zombie.renew, zombie.release):
        with pytest.raises(Fenced, match="held by b in term 2"):
            step()
    assert read_role(store, "trainer")[0].holder == "b"  # pyright: ignore[reportOptionalSubscript]


def test_two_competitors_have_one_winner(store):
    acquire_lease(store, candidate("old"), wait_s=0).release()

    def compete(number):
        return LeaseClaim(store, candidate(f"c{number}")).attempt()

    won = [lease for lease in in_threads(8, compete) if lease is not None]
    assert [lease.term for lease in won] == [2]
    won[0].renew()


def test_a_swap_whose_answer_was_lost_is_recognised_by_its_nonce(store):
    lost = acquire_lease(store, candidate("a"), wait_s=0)
    again = acquire_lease(store, candidate("a"), wait_s=0)
    assert (again.term, again.nonce) == (lost.term, lost.nonce)
    again.renew()


def test_a_renewal_whose_answer_was_lost_is_recognised(store):
    lease = acquire_lease(store, candidate("a"), wait_s=0)
    etag = lease._etag
    lease.renew()
    lease._etag, lease._record = etag, RoleRecord("trainer", 1, "a", "nonce-a", 0, 10.0, False)
    lease.renew()
    assert read_role(store, "trainer")[0].renewals == 1  # pyright: ignore[reportOptionalSubscript]


def test_a_deleted_lease_fences_its_holder(store):
    lease = acquire_lease(store, candidate("a"), wait_s=0)
    store.delete(role_key("trainer"))
    with pytest.raises(Fenced, match="deleted"):
        lease.renew()


def test_a_damaged_lease_is_named(store):
    store.put(role_key("trainer"), b'{"role": "trainer"')
    with pytest.raises(CorruptObject, match=r"roles/trainer\.json"):
        acquire_lease(store, candidate("a"), wait_s=0)


def test_may_take_is_exact_at_the_duration():
    record = RoleRecord("r", 1, "a", "n", 0, 5.0, False)
    assert [may_take(record, None, seconds) for seconds in (0.0, 4.999, 5.0)] == [
        False,
        False,
        True,
    ]
    assert may_take(record, "n", 0.0)
    assert not may_take(record, "other", 0.0)


class FailingLease:
    role, term, duration_s = "trainer", 1, 10.0

    def renew(self):
        raise StoreError("the store is away")


def test_a_failing_store_is_borne_until_the_duration_has_passed():
    clock = Clock()
    assert renew_once(FailingLease(), 100.0, clock) == 100.0  # pyright: ignore[reportArgumentType]
    clock.sleep(9.9)
    assert renew_once(FailingLease(), 100.0, clock) == 100.0  # pyright: ignore[reportArgumentType]
    clock.sleep(0.1)
    with pytest.raises(Fenced, match="could not be renewed"):
        renew_once(FailingLease(), 100.0, clock)  # pyright: ignore[reportArgumentType]


def test_renewed_counts_from_before_the_swap(store):
    clock = Clock()
    lease = acquire_lease(store, candidate("a"), wait_s=0)
    clock.sleep(3.0)
    assert renew_once(lease, 100.0, clock) == 103.0


def test_the_background_renewal_renews_and_stops(store):
    lease = acquire_lease(store, candidate("a", duration_s=0.03), wait_s=0)
    watch = threading.Event()
    with LeaseRenewal(lease) as renewal:
        while read_role(store, "trainer")[0].renewals < 3:  # pyright: ignore[reportOptionalSubscript]
            watch.wait(0.005)
    assert not renewal.lost.is_set()
    lease.release()


def test_the_background_renewal_reports_a_higher_term_once(store):
    lease = acquire_lease(store, candidate("a", duration_s=0.03), wait_s=0)
    acquire_lease(store, candidate("b", handed=lease.nonce), wait_s=0)
    errors = []
    with LeaseRenewal(lease, errors.append) as renewal:
        assert renewal.lost.wait(WAIT_S)
    assert [type(error) for error in errors] == [Fenced]


class BrokenLease:
    role, term, duration_s = "trainer", 1, 0.03

    def renew(self):
        raise TypeError("a bug")


def test_an_unexpected_error_ends_the_holder_too_and_is_logged(caplog):
    errors = []
    with LeaseRenewal(BrokenLease(), errors.append) as renewal:  # pyright: ignore[reportArgumentType]
        assert renewal.lost.wait(WAIT_S)
    assert [type(error) for error in errors] == [Fenced]
    assert "TypeError: a bug" in str(errors[0])
    assert "could not be renewed" in caplog.text


def test_leases_and_the_pointer_do_not_cost_their_users_torch():
    script = """
import sys
import rollstream.storage.stores.connect, rollstream.storage.metrics_file, rollstream.storage.leases
import rollstream.storage.weights.pointer, rollstream.storage.weights.retention
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


def test_each_start_of_a_name_has_its_own_term(store):
    assert [next_term(store, "rollouts", "r0") for _ in range(3)] == [1, 2, 3]
    assert next_term(store, "rollouts", "r1") == 1
    assert next_term(store, "relays", "r0") == 1
    assert [entry.key for entry in store.list("roles/rollouts/")] == [
        "roles/rollouts/r0.json",
        "roles/rollouts/r1.json",
    ]


def test_starts_of_one_name_at_the_same_time_get_different_terms(store):
    terms = in_threads(6, lambda _: next_term(store, "rollouts", "r0"))
    assert sorted(terms) == [1, 2, 3, 4, 5, 6]


def retire(store, term):
    RoleTerms(store, lambda: 0.0).retire("rollouts", {"r0": term})


def test_a_name_that_was_retired_returns_in_terms_of_its_own(store):
    assert [next_term(store, "rollouts", name) for name in ("r0", "r0", "r1")] == [1, 2, 1]
    retire(store, 1)
    assert role_names(store, "rollouts") == ["r0", "r1"], "it took a higher term since then"
    for _ in range(2):
        retire(store, 2)
        assert role_names(store, "rollouts") == ["r1"]
    returned = [next_term(store, "rollouts", name) for name in ("r0", "r0", "r1", "r2")]
    assert returned == [STARTS + 1, STARTS + 2, 2, 2 * STARTS + 1]
    assert list(map(restarts_of, returned)) == [0, 1, 1, 0]


def test_a_holder_whose_name_was_retired_is_known_again_and_keeps_its_term(store):
    term, terms = next_term(store, "rollouts", "r0"), RoleTerms(store, lambda: 0.0)
    hold_name(store, "rollouts", "r0")
    retire(store, term)
    assert not terms.has_taken("rollouts", "r0", term)
    hold_name(store, "rollouts", "r0")
    assert RoleTerms(store, lambda: 0.0).has_taken("rollouts", "r0", term)
    assert next_term(store, "rollouts", "r0") == STARTS + 2


class Interrupted(MemoryStore):
    """At request number `at` other processes act first."""

    def __init__(self, at, meanwhile):
        super().__init__()
        self.at, self.meanwhile, self.requests = at, meanwhile, 0

    def read(self, key):
        return self._after(super().read, key)

    def create(self, key, data):
        return self._after(super().create, key, data)

    def swap(self, key, data, etag):
        return self._after(super().swap, key, data, etag)

    def delete_all(self, keys):
        return self._after(super().delete_all, keys)

    def _after(self, make, *given):
        self.requests += 1
        if self.requests == self.at:
            self.meanwhile(self)
        return make(*given)


@pytest.mark.parametrize("lives", [1, 2, 3])
@pytest.mark.parametrize("at", range(1, 25))
def test_no_term_is_taken_twice_however_late_a_start_or_a_deletion_takes_effect(at, lives):
    """At each request another process of the name lives, is retired, and the name returns."""
    terms = []

    def start(store, times):
        terms.extend(next_term(store, "rollouts", "r0") for _ in range(times))

    def meanwhile(store):
        for _ in range(lives):
            start(store, lives)
            retire(store, terms[-1])
            start(store, lives - 1)

    store = Interrupted(at, meanwhile)
    for _ in range(3):
        start(store, 2)
        retire(store, terms[-1])
    start(store, 3)
    assert len(set(terms)) == len(terms) > 8


class Turns:
    """Threads one at a time in virtual time: the one whose pause ends first runs next."""

    def __init__(self):
        self.now_s, self._count, self._sleeping = 0.0, itertools.count(), []
        self._done = threading.Semaphore(0)

    def wait(self, seconds):
        mine = self._sleep(seconds)
        self._next()
        mine.acquire()

    def run(self, count, work):
        for _ in range(count):
            mine = self._sleep(0.0)
            threading.Thread(target=self._run, args=(mine, work), daemon=True).start()
        self._next()
        assert self._done.acquire(timeout=300)

    def _sleep(self, seconds):
        mine = threading.Semaphore(0)
        heapq.heappush(self._sleeping, (self.now_s + seconds, next(self._count), mine))
        return mine

    def _run(self, mine, work):
        mine.acquire()
        work()
        self._next()

    def _next(self):
        if not self._sleeping:
            self._done.release()
            return
        self.now_s, _, who = heapq.heappop(self._sleeping)
        who.release()


class Distant(MemoryStore):
    """Each request takes a while."""

    def __init__(self, turns, seconds):
        super().__init__()
        self.turns, self.seconds, self.requests = turns, seconds, 0

    def read(self, key):
        return self._slowly(super().read, key)

    def create(self, key, data):
        return self._slowly(super().create, key, data)

    def swap(self, key, data, etag):
        return self._slowly(super().swap, key, data, etag)

    def _slowly(self, make, *given):
        self.requests += 1
        self.turns.wait(self.seconds / 2)
        try:
            return make(*given)
        finally:
            self.turns.wait(self.seconds / 2)


def test_a_thousand_relays_that_start_together_all_take_a_term():
    """They share one name: with 100 tries and no pause 56 of 300 died."""
    turns, terms = Turns(), []
    store, draw = Distant(turns, 0.01), random.Random(1).uniform
    turns.run(1000, lambda: terms.append(next_term(store, "relays", "chain", draw, turns.wait)))
    assert sorted(terms) == list(range(1, 1001))
    assert turns.now_s < 120, "a start waits a minute or two at most"
    assert store.requests < 40_000, "one of 250 000 would be turned away by a real store"
