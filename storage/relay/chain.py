"""Who reads from whom. Pure: what was heard of each relay in, its upstream out (invariant 9).

Relays stand in the order of their terms, which one counter of the store gives out to all of them:
no two are equal, and who starts later stands behind. Each reads from the nearest living one before
it, the head from the trainer's push and from the bucket. So a dead one is spliced out by leaving it
out, the next becomes head when the head is gone, and a late joiner is appended.

No cycle of waiting can form, whatever each relay believes about the others: everyone reads from
terms below its own only. Two relays that see different members (A has heard that C is dead, B has
not) may read from the same one, or both from the bucket: that costs bytes, never progress.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

RELAY_TERMS = "chain"
"""The one name under which all relays count their terms, so that terms order them."""


@dataclass(frozen=True, slots=True)
class Member:
    """One start of a relay; `heard_s` is when its last heartbeat came, on the reader's clock."""

    name: str
    term: int
    url: str
    heard_s: float


def chain(
    members: Iterable[Member],
    now_s: float,
    timeout_s: float,
    suspected: Collection[int] = (),
) -> list[Member]:
    """The living ones in their order: heard within the time-out, not suspected (by term), not
    leaving (no URL), and of each name only the newest start.
    """
    newest: dict[str, Member] = {}
    for member in members:
        known = newest.get(member.name)
        if known is None or member.term > known.term:
            newest[member.name] = member
    living = (
        member
        for member in newest.values()
        if member.url and now_s - member.heard_s <= timeout_s and member.term not in suspected
    )
    return sorted(living, key=lambda member: member.term)


def upstream_of(term: int, ordered: Iterable[Member]) -> Member | None:
    """The nearest one before `term`; None for the head."""
    before = [member for member in ordered if member.term < term]
    return max(before, key=lambda member: member.term, default=None)


def still_suspected(
    suspects: Mapping[int, float], now_s: float, forgive_s: float
) -> dict[int, float]:
    """Suspects by the time of their last failure, without those that are to be tried again."""
    return {term: at for term, at in suspects.items() if now_s - at < forgive_s}


def transfer_s(relays: int, size: int, chunk: int, bytes_per_s: float, hop_s: float = 0.0) -> float:
    """Seconds until the last of `relays` has `size` bytes, sent on chunk by chunk: pipelining makes
    it (relays − 1 + chunks) turns of one chunk each.
    """
    turns = relays - 1 + -(-size // chunk)
    return turns * (chunk / bytes_per_s + hop_s)
