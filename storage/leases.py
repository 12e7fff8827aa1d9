"""Gives a role with a single holder to one process in each term: lease and next term are taken in
one compare-and-swap. The lease only avoids double work; the term decides which records count
(docs/explanation/storage.md).

Reading list: after `streams/reader.py`, before `producers/prompt_source.py`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollstream.errors import Fenced, LeaseHeld, ObjectExists, SwapLost
from rollstream.metric_values import MetricValues
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.terms import RoleRecord, read_role, role_key

POLLS_PER_DURATION = 10  # so a takeover is at most a tenth of the lease's duration late
POLL_S_MAX = 1.0  # longest pause between two polls


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """`holder` is a name for messages, `duration_s` the time after which the lease counts as
    abandoned unless renewed, `nonce` a random text that only this process uses. `handed_nonce` is
    the nonce of the last holder, if the supervisor has reaped that process: then no wait is needed.
    """

    role: str
    holder: str
    nonce: str
    duration_s: float = 10.0
    handed_nonce: str | None = None


def may_take(record: RoleRecord, handed_nonce: str | None, unchanged_s: float) -> bool:
    """Returns whether the lease's duration has passed (`unchanged_s` is on the process's own
    monotonic clock), it was released, or `handed_nonce` is the holder's nonce.
    """
    handed = handed_nonce is not None and handed_nonce == record.nonce
    return record.released or handed or unchanged_s >= record.duration_s


class Lease:
    """Threads may renew and release it. Of a holder that is suspended for longer than the lease's
    duration, the next renewal raises `Fenced`, and the records that it appends until then are void
    by their term (invariant 7).
    """

    def __init__(self, store: ObjectStore, record: RoleRecord, etag: str) -> None:
        self._store = store
        self._record = record
        self._etag = etag
        self._lock = threading.Lock()
        self.role = record.role
        self.term = record.term
        self.nonce = record.nonce
        self.duration_s = record.duration_s

    def renew(self) -> None:
        """Hold the role for another duration. Raises `Fenced` if another process has taken it."""
        with self._lock:
            self._swap(replace(self._record, renewals=self._record.renewals + 1))

    def release(self) -> None:
        """Free the role at once; idempotent. Raises `Fenced` if another process has already taken
        it.
        """
        with self._lock:
            if not self._record.released:
                self._swap(replace(self._record, released=True))

    def metric_values(self) -> MetricValues:
        record = self._record
        return {"lease_term": record.term, "lease_renewals_total": record.renewals}

    def _swap(self, record: RoleRecord) -> None:
        try:
            etag = self._store.swap(role_key(self.role), encode_json(record), self._etag)
        except SwapLost:
            etag = self._etag_of(record)
        self._record, self._etag = record, etag

    def _etag_of(self, record: RoleRecord) -> str:
        present = read_role(self._store, self.role)
        if present is not None and present[0] == record:
            # The swap took effect and only its answer was lost.
            return present[1]
        by = (
            f"{present[0].holder} in term {present[0].term}"
            if present
            else "no process (its record was deleted)"
        )
        raise Fenced(
            f"role {self.role} of term {self.term} is held by {by}; this process must exit"
        )


class LeaseClaim:
    """Keeps the etag that it read last, and the time at which it first read it."""

    def __init__(
        self,
        store: ObjectStore,
        candidate: LeaseCandidate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._candidate = candidate
        self._clock = clock
        self._last_etag = ""
        self._last_change_s = 0.0

    def attempt(self) -> Lease | None:
        """Returns the lease, None if it may not be taken now, or another process was faster."""
        present = read_role(self._store, self._candidate.role)
        if present is None:
            return self._take(None, "")
        record, etag = present
        if record.nonce == self._candidate.nonce and not record.released:
            return Lease(self._store, record, etag)  # won by a swap whose answer was lost
        now = self._clock()
        # Clocks of two machines are never compared: only this one measures how long the lease is
        # unchanged.
        if etag != self._last_etag:
            self._last_etag, self._last_change_s = etag, now
        if may_take(record, self._candidate.handed_nonce, now - self._last_change_s):
            return self._take(record, etag)
        return None

    def _take(self, before: RoleRecord | None, etag: str) -> Lease | None:
        who = self._candidate
        term = before.term + 1 if before else 1
        record = RoleRecord(who.role, term, who.holder, who.nonce, 0, who.duration_s, False)
        try:
            if before:
                taken = self._store.swap(role_key(who.role), encode_json(record), etag)
            else:
                taken = self._store.create(role_key(who.role), encode_json(record))
        except (SwapLost, ObjectExists):
            return None
        return Lease(self._store, record, taken)


def acquire_lease(
    store: ObjectStore,
    candidate: LeaseCandidate,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Waits until the role may be taken. Raises `LeaseHeld` if that takes longer than `wait_s`."""
    claim = LeaseClaim(store, candidate, clock)
    give_up = clock() + wait_s
    while True:
        lease = claim.attempt()
        if lease is not None:
            return lease
        remaining_s = give_up - clock()
        if remaining_s <= 0:
            raise _lease_held(store, candidate.role, wait_s)
        sleep(min(remaining_s, POLL_S_MAX, candidate.duration_s / POLLS_PER_DURATION))


def _lease_held(store: ObjectStore, role: str, wait_s: float) -> LeaseHeld:
    present = read_role(store, role)
    by = f"{present[0].holder} (term {present[0].term})" if present else "another process"
    return LeaseHeld(
        f"role {role} is held by {by} and was not released within {wait_s:.1f} s; "
        "stop that process, or wait longer"
    )
