"""Which records of many writers dispatch acts on (invariant 12): pure rules for partials and
statuses, and whether a rollout's name has taken the term that a record names.

What the terms stop: a status of `rollout-0` in term 1 000, which nobody holds, would make the
living one of term 1 a zombie, and the next order would end its process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from consumers.dispatch.state import Order
from storage.keys import PART_BYTES_MAX, is_key
from storage.objects import ObjectStore
from storage.roles import names_of, term_of
from streams.links import is_number, is_version, malformed
from streams.records import Applied, Partial, RolloutStatus

SLOTS_MAX = 1 << 16  # of one rollout: slots, requests and the decode batch
SPEED_MAX = 1e9  # tokens per second
LOOK_S = 1.0  # between two looks into the store for the same name, or for names that are not there
ROLLOUTS, RELAYS = "rollouts", "relays"
"""The roles under which they take their terms."""


def refused_status(status: RolloutStatus) -> str:
    """Why no plan may use it, or ""."""
    counts = (status.slots, status.running, status.waiting, status.queued, status.decode_batch_max)
    if not all(0 <= count <= SLOTS_MAX for count in counts):
        return "slots or requests out of bounds"
    sizes = (status.term, status.kv_used, status.kv_capacity, status.kv_previous)
    if not all(map(is_number, (*sizes, abs(status.quota_left)))) or not is_version(status.version):
        return "a size, a term or a version out of bounds"
    return "" if 0 <= status.tokens_per_s <= SPEED_MAX else "tokens per second out of bounds"


def refused_applied(applied: Applied) -> str:
    """Why it cannot be what a rollout serves, or ""."""
    numbers = (applied.rollout_term, applied.tensors, applied.compared)
    is_sound = all(map(is_number, numbers)) and is_version(applied.version)
    return "" if is_sound else "a count, a term or a version out of bounds"


def refused_partial(partial: Partial, order: Order | None) -> str:
    """Why no resume may start from it, or "". The attempt must have been ordered, the newest one of
    this very rollout.
    """
    if order is None or not 0 < partial.attempt <= order.attempt:
        return f"attempt {partial.attempt} was never ordered"
    holder = (order.rollout, order.rollout_term)
    if partial.attempt == order.attempt and (partial.rollout, partial.rollout_term) != holder:
        return f"attempt {partial.attempt} is not of {partial.rollout}"
    return malformed(partial)


@dataclass(slots=True)
class Terms:
    """Terms that names have taken in the roles of many holders, by the store. A rollout and a relay
    take theirs before their first record, so a name that is not there, or a higher term than is
    there, is refused; asked again at most every `LOOK_S` for the same.
    """

    store: ObjectStore
    monotonic: Callable[[], float]
    _highest: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _looked_s: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    _listed_s: dict[str, float] = field(default_factory=dict[str, float])

    def has_taken(self, role: str, name: str, term: int) -> bool:
        """Whether this name has held this term at some time."""
        if term <= self._highest.get((role, name), 0):
            return term > 0
        if not is_key(name) or "/" in name or len(name) > PART_BYTES_MAX:
            return False
        self._look(role, name)
        return 0 < term <= self._highest.get((role, name), 0)

    def _look(self, role: str, name: str) -> None:
        """One listing shows which names there are, however many unknown ones are asked for."""
        now_s, key = self.monotonic(), (role, name)
        if key not in self._highest:
            if now_s - self._listed_s.get(role, float("-inf")) < LOOK_S:
                return
            self._listed_s[role] = now_s
            for found in names_of(self.store, role):
                self._highest.setdefault((role, found), 0)
        is_due = now_s - self._looked_s.get(key, float("-inf")) >= LOOK_S
        if key in self._highest and is_due:
            self._looked_s[key] = now_s
            self._highest[key] = term_of(self.store, role, name)


def anyone(role: str, name: str, term: int) -> bool:
    """In place of `Terms.has_taken` where no store says who there is."""
    return True
