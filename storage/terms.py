"""Terms and holders of roles: the small objects under `roles/`.

A role's term only grows, by compare-and-swap. Single-holder roles keep theirs in the lease
(`leases.py`, `roles/<role>.json`). Roles with many holders count one term per name here
(`roles/<role>/<name>.json`), so that each restart of a name fences its earlier process.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollstream.errors import ObjectExists, ObjectMissing, StoreError, SwapLost
from rollstream.storage.stores.base import PART_BYTES_MAX, ObjectStore, is_key
from rollstream.storage.stores.json_objects import decode_json, encode_json

ROLLOUTS, RELAYS = "rollouts", "relays"
"""The roles with many holders."""
SWAPS_MAX = 100
LOOKUP_S = 1.0  # between two reads of the store for the same name, or for unknown names
BACKOFF_S, BACKOFF_S_MAX = 0.02, 10.0
"""Pause after a lost swap. A rollout competes only with its own restarts. All relays of a cluster
count under one name, since the term is their place in the chain. Of N rivals that swap at once one
wins, so they need N round trips in any case; the random pause doubles until about one swaps at a
time.
"""


@dataclass(frozen=True, slots=True)
class RoleRecord:
    """A single-holder role: its holder under `term`, and a count that changes with every
    renewal.
    """

    role: str
    term: int
    holder: str
    nonce: str
    renewals: int
    duration_s: float
    released: bool


@dataclass(frozen=True, slots=True)
class NameRecord:
    """One name of a role with many holders, and the term of its newest start."""

    role: str
    name: str
    term: int


def role_key(role: str) -> str:
    return f"roles/{role}.json"


def read_role(store: ObjectStore, role: str) -> tuple[RoleRecord, str] | None:
    """The role's record and the etag to swap it by; None if the role was never held."""
    key = role_key(role)
    try:
        data, etag = store.read(key)
    except ObjectMissing:
        return None
    return decode_json(data, RoleRecord, key), etag


def next_term(
    store: ObjectStore,
    role: str,
    name: str,
    uniform: Callable[[float, float], float] = random.uniform,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """A term that no other process with this name has or had; 1 is the first.

    If the caller dies after the swap, a number is skipped.
    """
    key = f"roles/{role}/{name}.json"
    for lost in range(SWAPS_MAX):
        try:
            data, etag = store.read(key)
        except ObjectMissing:
            data, etag = b"", ""
        term = decode_json(data, NameRecord, key).term + 1 if data else 1
        wanted = encode_json(NameRecord(role, name, term))
        try:
            if etag:
                store.swap(key, wanted, etag)
            else:
                store.create(key, wanted)
        except (SwapLost, ObjectExists):
            sleep(uniform(0.0, min(BACKOFF_S_MAX, BACKOFF_S * 2**lost)))
            continue
        return term
    raise StoreError(f"{key}: lost {SWAPS_MAX} swaps in a row; do many processes use {name}?")


def newest_term(store: ObjectStore, role: str, name: str) -> int:
    """The newest term of this name; 0 before the first."""
    key = f"roles/{role}/{name}.json"
    try:
        return decode_json(store.get(key), NameRecord, key).term
    except ObjectMissing:
        return 0


def role_names(store: ObjectStore, role: str) -> list[str]:
    """All names that have ever taken a term."""
    prefix, suffix = f"roles/{role}/", ".json"
    keys = [entry.key for entry in store.list(prefix)]
    return [key[len(prefix) : -len(suffix)] for key in keys if key.endswith(suffix)]


@dataclass(slots=True)
class RoleTerms:
    """Terms that names have taken in the roles of many holders, read from the store. A rollout or
    relay takes its term before its first record, so an unknown name or a higher term is refused.
    The store is read for the same name at most every `LOOKUP_S`.

    Otherwise a forged status of `rollout-0` in term 1 000 would make the living rollout of term 1 a
    zombie, and the next assignment would end its process.
    """

    store: ObjectStore
    monotonic: Callable[[], float]
    _highest: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _looked_s: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    _listed_s: dict[str, float] = field(default_factory=dict[str, float])

    def has_taken(self, role: str, name: str, term: int) -> bool:
        """Whether this name has ever held this term."""
        if term <= self._highest.get((role, name), 0):
            return term > 0
        if not is_key(name) or "/" in name or len(name) > PART_BYTES_MAX:
            return False
        self._look(role, name)
        return 0 < term <= self._highest.get((role, name), 0)

    def _look(self, role: str, name: str) -> None:
        """Refresh the highest term of a name. One listing shows all names, however many unknown
        ones are asked for.
        """
        now_s, key = self.monotonic(), (role, name)
        if key not in self._highest:
            if now_s - self._listed_s.get(role, float("-inf")) < LOOKUP_S:
                return
            self._listed_s[role] = now_s
            for found in role_names(self.store, role):
                self._highest.setdefault((role, found), 0)
        is_due = now_s - self._looked_s.get(key, float("-inf")) >= LOOKUP_S
        if key in self._highest and is_due:
            self._looked_s[key] = now_s
            self._highest[key] = newest_term(self.store, role, name)
