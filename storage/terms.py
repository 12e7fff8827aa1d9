"""Gives a term to each start of a process, by compare-and-swap of small objects under `roles/`. No
two starts under one name get the same, and a name's terms only grow: each restart fences the
earlier process.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from rollstream.errors import ObjectExists, ObjectMissing, StoreError, SwapLost
from rollstream.storage.stores.base import PART_BYTES_MAX, ObjectStore, is_key
from rollstream.storage.stores.json_objects import decode_json, encode_json
from rollstream.storage.stores.run_keys import LEASES, RunKeys

ROLLOUTS, RELAYS = "rollouts", "relays"
"""The roles with many holders."""
RELAY_TERMS = "chain"
"""All relays have terms under this one name, so that they order the relays."""
SINGLE_HOLDERS = ("trainer", "dispatch", "prompts", "archive")
REPLAYS = "replay"  # a replay takes the term of its records under this role and name
STREAMS = "streams"  # the publishers of named weight streams, each under its stream's name
_NAMED = "|".join((ROLLOUTS, RELAYS, REPLAYS, STREAMS))
RUN_KEYS = (
    RunKeys(
        re.compile(
            rf"roles/(?:(?:{'|'.join(SINGLE_HOLDERS)})\.json"
            rf"|(?:{_NAMED})/(?:[^/]+\.json|generation))"
        ),
        "terms",
        deletion=LEASES,
    ),
)
SWAPS_MAX = 100
SUSPECTS_MAX = 1000  # records whose names wait for the next look at the store
LOOKUP_S = 1.0  # between two reads of the store for one name, or two listings for unknown names
BACKOFF_S, BACKOFF_S_MAX = 0.02, 10.0
"""The longest random pause after a lost swap, doubled at each, and its bound. All relays take terms
under one name: of N that swap at once one wins; the pauses grow until about one swaps at a time.
"""


@dataclass(frozen=True, slots=True)
class RoleRecord:
    """A lease: its holder under `term`, a random `nonce`, and after how many seconds without a
    renewal another process may take it. `released`: another may take it at once.
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
    """A name of a role with many holders, and the term of its newest start."""

    role: str
    name: str
    term: int


STARTS = 1 << 20
"""The most terms of a name in one generation: a restart a second for 12 days."""


@dataclass(frozen=True, slots=True)
class TermGeneration:
    """A term is generation · 2²⁰ + start; start counts the starts of a name in that generation.
    Each creation of a name's missing object takes a new generation, so no term is taken twice.
    """

    role: str
    generation: int


RecordType = TypeVar("RecordType", RoleRecord, NameRecord, TermGeneration)


def restarts_of(term: int) -> int:
    """Returns how often the name with this term was restarted since its object was created."""
    return (term - 1) % STARTS


def role_key(role: str) -> str:
    return f"roles/{role}.json"


def _name_key(role: str, name: str) -> str:
    return f"roles/{role}/{name}.json"


def read_role(store: ObjectStore, role: str) -> tuple[RoleRecord, str] | None:
    """Returns the role's record with the etag to swap it by; None if the role was never held."""
    return _read(store, role_key(role), RoleRecord)


def _read(store: ObjectStore, key: str, kind: type[RecordType]) -> tuple[RecordType, str] | None:
    try:
        data, etag = store.read(key)
    except ObjectMissing:
        return None
    return decode_json(data, kind, key), etag


def next_term(
    store: ObjectStore,
    role: str,
    name: str,
    uniform: Callable[[float, float], float] = random.uniform,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Returns a term higher than all terms that this name had; the first is 1, or the first of a
    new generation. A term that the caller does not use is skipped. Raises `StoreError` after
    `SWAPS_MAX` lost swaps.
    """
    key, is_late = _name_key(role, name), False
    for lost in range(SWAPS_MAX):
        current = _read(store, key, NameRecord)
        generation = 0 if current and not is_late else _next_generation(store, role)
        term = generation * STARTS + 1 if is_late or current is None else current[0].term + 1
        encoded = encode_json(NameRecord(role, name, term))
        try:
            if current:
                store.swap(key, encoded, current[1])
            else:
                store.create(key, encoded)
        except (SwapLost, ObjectExists):
            sleep(uniform(0.0, min(BACKOFF_S_MAX, BACKOFF_S * 2**lost)))
            continue
        if generation or current or _read(store, _generation_key(role), TermGeneration) is None:
            return term
        # The counter was created meanwhile, so an earlier object of this name may have been
        # deleted, and this term of generation 0 may be taken: take one of a new generation.
        is_late = True
    raise StoreError(f"{key}: lost {SWAPS_MAX} swaps in a row; do many processes use {name}?")


def hold_name(store: ObjectStore, role: str, name: str) -> None:
    """Create the object again if it was deleted although a process uses the name. It gets a new
    term; the holder keeps its own, lower one.
    """
    if not newest_term(store, role, name):
        next_term(store, role, name)


def _generation_key(role: str) -> str:
    return f"roles/{role}/generation"  # no name has this key: the keys of names end with .json


def is_generation(key: str) -> bool:
    """Returns whether it is a generation counter: a program that copies `roles/` must copy these
    last, so that none is older than an object that took a generation from it.
    """
    return key.startswith("roles/") and key.endswith("/generation")


def _next_generation(store: ObjectStore, role: str) -> int:
    key = _generation_key(role)
    for _ in range(SWAPS_MAX):
        counter = _read(store, key, TermGeneration)
        if counter is None:
            # None of the role's objects was ever deleted.
            return 0
        new = TermGeneration(role, counter[0].generation + 1)
        try:
            store.swap(key, encode_json(new), counter[1])
        except SwapLost:
            continue
        return new.generation
    raise StoreError(f"{key}: lost {SWAPS_MAX} swaps in a row")


def newest_term(store: ObjectStore, role: str, name: str) -> int:
    record = _read(store, _name_key(role, name), NameRecord)
    return 0 if record is None else record[0].term


def retired_term_max(store: ObjectStore, role: str) -> int:
    """Returns the last term of the newest generation, a bound on retired names' terms; 0 if there
    are none.
    """
    counter = _read(store, _generation_key(role), TermGeneration)
    return 0 if counter is None else (counter[0].generation + 1) * STARTS


def role_names(store: ObjectStore, role: str) -> list[str]:
    prefix, suffix = f"roles/{role}/", ".json"
    keys = [entry.key for entry in store.list(prefix)]
    return [key[len(prefix) : -len(suffix)] for key in keys if key.endswith(suffix)]


@dataclass(slots=True)
class RoleTerms:
    """Checks whether a record of a rollout or relay has a true name and term: each takes its term
    before its first record. Otherwise a forged status of `rollout-0` in term 1 000 would make the
    living rollout of term 1 a zombie and end its process. The store is read for the same name at
    most every `LOOKUP_S`.
    """

    store: ObjectStore
    monotonic: Callable[[], float]
    _highest: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _looked_s: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    _listed_s: dict[str, float] = field(default_factory=dict[str, float])
    _suspects: list[tuple[str, str, int, str, float]] = field(
        default_factory=list[tuple[str, str, int, str, float]]
    )

    def suspect(self, role: str, name: str, term: int, label: str) -> None:
        """Note a record for which `has_taken` was false: the store may have been read before the
        record was written.
        """
        if len(self._suspects) < SUSPECTS_MAX:
            self._suspects.append((role, name, term, label, self.monotonic()))

    def confirmed(self) -> Counter[str]:
        """Returns, by label, the suspected records whose term the store lacked when it was read
        after them.
        """
        suspects, self._suspects = self._suspects, []
        counts = Counter[str]()
        for role, name, term, label, since_s in suspects:
            if self.has_taken(role, name, term):
                continue
            looked_s = self._looked_s.get((role, name), self._listed_s.get(role, since_s))
            if looked_s >= since_s:
                counts[label] += 1
            else:
                self._suspects.append((role, name, term, label, since_s))
        return counts

    def has_taken(self, role: str, name: str, term: int) -> bool:
        """Returns whether the term is at most the name's newest."""
        if term <= self._highest.get((role, name), 0):
            return term > 0
        if not is_key(name) or "/" in name or len(name) > PART_BYTES_MAX:
            return False
        self._look(role, name)
        return 0 < term <= self._highest.get((role, name), 0)

    def retire(self, role: str, terms: Mapping[str, int]) -> None:
        """Delete the objects of names that died long ago under these terms; one with a higher term
        stays. Idempotent.

        A deletion does no harm, however late it takes effect, because each creation of a missing
        object takes a new generation (`TermGeneration`):

        * The name starts between dispatch's read and deletion: a new generation, no term twice.
        * A suspended dispatch repeats its successor's deletion: the same.
        * The name starts and loads its model for minutes: the comparison of terms keeps it known.
        * A holder resumes after its object was deleted: `hold_name`.

        A rollout calls `hold_name` after each fetch of a version.
        """
        with suppress(ObjectExists):
            self.store.create(_generation_key(role), encode_json(TermGeneration(role, 0)))
        dead = [n for n, term in terms.items() if newest_term(self.store, role, n) == term]
        self.store.delete_all([_name_key(role, name) for name in dead])
        for name in dead:
            self._highest.pop((role, name), None)
            self._looked_s.pop((role, name), None)

    def _look(self, role: str, name: str) -> None:
        now_s, key = self.monotonic(), (role, name)
        if key not in self._highest:
            # One listing for all unknown names, so that many of them do not cost a request each.
            if now_s - self._listed_s.get(role, float("-inf")) < LOOKUP_S:
                return
            self._listed_s[role] = now_s
            for listed_name in role_names(self.store, role):
                self._highest.setdefault((role, listed_name), 0)
        is_due = now_s - self._looked_s.get(key, float("-inf")) >= LOOKUP_S
        if key in self._highest and is_due:
            self._looked_s[key] = now_s
            self._highest[key] = newest_term(self.store, role, name)
