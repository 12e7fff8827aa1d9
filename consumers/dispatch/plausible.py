"""Which records of topics with many writers dispatch acts on (invariant 12): pure rules for
partials and statuses, and a check that a rollout's name has taken the term that its record names.

Without the check of terms a forged status of `rollout-0` in term 1 000 would make the living
rollout of term 1 a zombie, and the next assignment would end its process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rollstream.consumers.dispatch.state import CurrentAssignment
from rollstream.storage.stores.keys import PART_BYTES_MAX, is_key
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import role_names, newest_term
from rollstream.streams.partial_links import is_count, is_version, malformed_partial
from rollstream.streams.records import Applied, Partial, RolloutStatus

SLOTS_MAX = 1 << 16  # of one rollout: slots, requests and the decode batch
SPEED_MAX = 1e9  # tokens per second
LOOKUP_S = 1.0  # between two reads of the store for the same name, or for unknown names
ROLLOUTS, RELAYS = "rollouts", "relays"
"""The roles under which rollouts and relays take their terms."""


def refused_status(status: RolloutStatus) -> str:
    """The reason why no plan may use the status; "" if it may be used."""
    counts = (status.slots, status.running, status.waiting, status.queued, status.decode_batch_max)
    if not all(0 <= count <= SLOTS_MAX for count in counts):
        return "slots or requests out of bounds"
    sizes = (status.term, status.kv_used, status.kv_capacity, status.kv_previous)
    if not all(map(is_count, (*sizes, abs(status.quota_left)))) or not is_version(status.version):
        return "a size, a term or a version out of bounds"
    return "" if 0 <= status.tokens_per_s <= SPEED_MAX else "tokens per second out of bounds"


def refused_applied(applied: Applied) -> str:
    """The reason why the record is not plausible; "" if it is."""
    numbers = (applied.rollout_term, applied.tensors, applied.compared)
    is_sound = all(map(is_count, numbers)) and is_version(applied.version)
    return "" if is_sound else "a count, a term or a version out of bounds"


def refused_partial(partial: Partial, order: CurrentAssignment | None) -> str:
    """The reason why no resume may start from the partial; "" if one may. Its attempt must have
    been assigned, the newest one to this rollout and term.
    """
    if order is None or not 0 < partial.attempt <= order.attempt:
        return f"attempt {partial.attempt} was never assigned"
    holder = (order.rollout, order.rollout_term)
    if partial.attempt == order.attempt and (partial.rollout, partial.rollout_term) != holder:
        return f"attempt {partial.attempt} was not assigned to {partial.rollout}"
    return malformed_partial(partial)


@dataclass(slots=True)
class RoleTerms:
    """Terms that names have taken in the roles of many holders, read from the store. A rollout or
    relay takes its term before its first record, so an unknown name or a higher term is refused.
    The store is read for the same name at most every `LOOKUP_S`.
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


def accept_any_term(role: str, name: str, term: int) -> bool:
    """Accepts every name and term; used in place of `Terms.has_taken` without a store."""
    return True
