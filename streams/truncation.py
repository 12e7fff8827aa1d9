"""Forgetting the old end of a topic without forgetting its fence (invariants 7 and 11).

What this stops: `Opened 3` is truncated away, and the first record kept is one that a zombie of
term 2 wrote after it. A reader that starts there without a fence would take it for valid. So the
position with its fence is committed under the group `TRUNCATED` before anything is truncated, and
`reader.from_begin` starts from it: a crash in between only keeps records that nobody reads.
"""

from collections.abc import Iterable, Mapping

from streams.bus import Bus
from streams.codec import envelope_of
from streams.errors import PositionLost
from streams.records import Address, Fence, Position

TRUNCATED = "truncated"
"""Consumer group that holds the positions below which a topic is forgotten."""
REBUILDING, ARCHIVING = "dispatch", "archive"
"""Groups under which dispatch commits from where it can rebuild, and the archive what it has."""
REBUILT = ("admissions", "trajectories", "ledger", "applied")
"""Topics that dispatch rebuilds from and others need too."""


def truncate(bus: Bus, topic: str, before: Mapping[int, Position]) -> dict[int, int]:
    """Forget records below `before`; returns how many offsets each partition lost.

    Only forwards: a position at or below what is forgotten already changes nothing.
    """
    begin = bus.begin(topic)
    ahead = {p: at for p, at in before.items() if at.offset > begin[p]}
    if not ahead:
        return {}
    known = bus.committed(TRUNCATED, topic)
    bus.commit(TRUNCATED, topic, {p: _later(at, known.get(p)) for p, at in ahead.items()})  # 1
    bus.truncate(topic, {p: at.offset for p, at in ahead.items()})  # 2
    return {p: at.offset - begin[p] for p, at in ahead.items()}


def truncated_begin(bus: Bus, topic: str) -> dict[int, Position]:
    """Positions of the first records that count, with the fence there."""
    known = bus.committed(TRUNCATED, topic)
    begin = bus.begin(topic).items()
    return {p: _later(Position(offset), known.get(p)) for p, offset in begin}


def earliest(candidates: Iterable[Mapping[int, Position]]) -> dict[int, Position]:
    """The least position of each partition; one that any candidate lacks is left out: somebody who
    needs it has not said how far.
    """
    bounds = list(candidates)
    if not bounds:
        return {}
    partitions = set(bounds[0]).intersection(*bounds[1:])
    return {p: min((b[p] for b in bounds), key=lambda at: at.offset) for p in sorted(partitions)}


def before_record(bus: Bus, topic: str, address: Address) -> Position:
    """The position of a record that counts, with the fence that stood before it."""
    messages = bus.read(topic, {address.partition: address.offset}, records_max=1)
    if not messages or messages[0].offset != address.offset or messages[0].value is None:
        raise PositionLost(f"{topic}: no record lies at {address}")
    envelope = envelope_of(messages[0].value)
    if envelope is None:
        return Position(address.offset)
    return Position(address.offset, Fence(envelope.term, envelope.sequence))


def before_oldest(
    bus: Bus, topic: str, positions: Mapping[int, Position], addresses: Iterable[Address]
) -> dict[int, Position]:
    """These positions, moved back to the oldest of these records where one lies before."""
    oldest: dict[int, Address] = {}
    for address in addresses:
        oldest[address.partition] = min(oldest.get(address.partition, address), address)
    before = dict(positions)
    for partition, address in oldest.items():
        if address.offset < before[partition].offset:
            before[partition] = before_record(bus, topic, address)
    return before


def _later(one: Position, other: Position | None) -> Position:
    """The one further on; at the same offset the one that knows its fence."""
    if other is None:
        return one
    return max(one, other, key=lambda at: (at.offset, at.fence))
