"""The order in which relays read from each other. Pure: the known relays in, the upstream out
(invariant 9).

Relays are ordered by their terms. One counter of the store issues the terms of all relays, so no
two are equal and a later start comes later. Each relay reads from the nearest living one before it;
the head receives the trainer's push and reads the bucket. A dead relay is left out, so its
successor reads from its predecessor or becomes head; a new relay is appended.

No cycle of waiting can form, whatever each relay believes about the others, because every relay
reads from lower terms only. Two relays with different views (A has noticed that C is dead, B has
not) may read from the same relay, or both from the bucket: that costs bytes, never progress.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

RELAY_TERMS = "chain"
"""The single name under which the terms of all relays are counted, so that terms order them."""


@dataclass(frozen=True, slots=True)
class ChainMember:
    """One start of a relay. `heartbeat_s` is the time of its last heartbeat on the
    reader's clock.
    """

    name: str
    term: int
    url: str
    heartbeat_s: float


def living_chain(
    members: Iterable[ChainMember],
    now_s: float,
    timeout_s: float,
    suspected: Collection[int] = (),
) -> list[ChainMember]:
    """The living relays in order: with a heartbeat within the time-out, not suspected (by term),
    not leaving (no URL), and only the newest start of each name.
    """
    newest: dict[str, ChainMember] = {}
    for member in members:
        known = newest.get(member.name)
        if known is None or member.term > known.term:
            newest[member.name] = member
    living = (
        member
        for member in newest.values()
        if member.url and now_s - member.heartbeat_s <= timeout_s and member.term not in suspected
    )
    return sorted(living, key=lambda member: member.term)


def upstream_of(term: int, ordered: Iterable[ChainMember]) -> ChainMember | None:
    """The nearest relay before `term`; None for the head."""
    before = [member for member in ordered if member.term < term]
    return max(before, key=lambda member: member.term, default=None)


def unexpired_suspects(
    suspects: Mapping[int, float], now_s: float, forgive_s: float
) -> dict[int, float]:
    """Suspects by the time of their last failure, without those that are to be tried again."""
    return {term: at for term, at in suspects.items() if now_s - at < forgive_s}


def transfer_s(relays: int, size: int, chunk: int, bytes_per_s: float, hop_s: float = 0.0) -> float:
    """Seconds until the last of `relays` has `size` bytes that are forwarded chunk by chunk: a
    pipeline of (relays − 1 + chunks) turns of one chunk each.
    """
    turns = relays - 1 + -(-size // chunk)
    return turns * (chunk / bytes_per_s + hop_s)
