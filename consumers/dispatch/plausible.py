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
ROLLOUTS = "rollouts"
"""The role under which rollouts take their terms."""


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
    """Terms that rollouts have taken, by the store. A rollout takes its term before its first
    record, so a name that is not there, or a higher term than is there, is refused; asked again at
    most every `LOOK_S` for the same.
    """

    store: ObjectStore
    monotonic: Callable[[], float]
    _highest: dict[str, int] = field(default_factory=dict[str, int])
    _looked_s: dict[str, float] = field(default_factory=dict[str, float])
    _listed_s: float = float("-inf")

    def has_taken(self, rollout: str, term: int) -> bool:
        """Whether this name has held this term at some time."""
        if term <= self._highest.get(rollout, 0):
            return term > 0
        if not is_key(rollout) or "/" in rollout or len(rollout) > PART_BYTES_MAX:
            return False
        self._look(rollout)
        return 0 < term <= self._highest.get(rollout, 0)

    def _look(self, rollout: str) -> None:
        """One listing shows which names there are, however many unknown ones are asked for."""
        now_s = self.monotonic()
        if rollout not in self._highest:
            if now_s - self._listed_s < LOOK_S:
                return
            self._listed_s = now_s
            self._highest = dict.fromkeys(names_of(self.store, ROLLOUTS), 0) | self._highest
        is_due = now_s - self._looked_s.get(rollout, float("-inf")) >= LOOK_S
        if rollout in self._highest and is_due:
            self._looked_s[rollout] = now_s
            self._highest[rollout] = term_of(self.store, ROLLOUTS, rollout)


def anyone(rollout: str, term: int) -> bool:
    """In place of `Terms.has_taken` where no store says who there is."""
    return True
