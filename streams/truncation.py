"""Truncates the old end of a topic and keeps the fence of its new begin (invariants 7 and 11).

What this stops: `Opened 3` is truncated, and the first kept record was written by a zombie of term
2 after it. A reader that starts there without a fence would accept that record. So the position
with its fence is committed under the group `TRUNCATED_GROUP` before anything is truncated, and
`reader.from_begin` starts from it. A crash between the two steps only keeps records that no reader
needs.
"""

from collections.abc import Iterable, Mapping

from rollstream.errors import PositionLost
from rollstream.streams.bus import Bus
from rollstream.streams.codec import envelope_of
from rollstream.streams.records import Fence, Position
from rollstream.streams.values import Address

TRUNCATED_GROUP = "truncated"
"""Consumer group that holds the positions below which a topic is truncated."""
DISPATCH_GROUP, ARCHIVE_GROUP = "dispatch", "archive"
"""Groups under which dispatch commits the positions from which it can rebuild, and the archive how
far it has archived.
"""
REBUILD_TOPICS = ("admissions", "trajectories", "ledger", "applied")
"""Topics that dispatch rebuilds its state from and that other roles need too."""


def truncate(bus: Bus, topic: str, before: Mapping[int, Position]) -> dict[int, int]:
    """Remove records below `before`. Returns by partition the number of offsets removed.

    Positions only move forwards: one at or below the present begin changes nothing.
    """
    begin = bus.begin(topic)
    ahead = {p: at for p, at in before.items() if at.offset > begin[p]}
    if not ahead:
        return {}
    known = bus.committed(TRUNCATED_GROUP, topic)
    bus.commit(
        TRUNCATED_GROUP, topic, {p: _later(at, known.get(p)) for p, at in ahead.items()}
    )  # 1
    bus.truncate(topic, {p: at.offset for p, at in ahead.items()})  # 2
    return {p: at.offset - begin[p] for p, at in ahead.items()}


def truncated_begin(bus: Bus, topic: str) -> dict[int, Position]:
    """Positions of the first records that count, with the fence there."""
    known = bus.committed(TRUNCATED_GROUP, topic)
    begin = bus.begin(topic).items()
    return {p: _later(Position(offset), known.get(p)) for p, offset in begin}


def earliest_positions(candidates: Iterable[Mapping[int, Position]]) -> dict[int, Position]:
    """The least position of each partition. A partition that any candidate lacks is left out: that
    candidate's need is unknown.
    """
    bounds = list(candidates)
    if not bounds:
        return {}
    partitions = set(bounds[0]).intersection(*bounds[1:])
    return {p: min((b[p] for b in bounds), key=lambda at: at.offset) for p in sorted(partitions)}


def position_before(bus: Bus, topic: str, address: Address) -> Position:
    """The position of a record that counts, with the fence before it."""
    messages = bus.read(topic, {address.partition: address.offset}, records_max=1)
    if not messages or messages[0].offset != address.offset or messages[0].value is None:
        raise PositionLost(f"{topic}: no record at {address}")
    envelope = envelope_of(messages[0].value)
    if envelope is None:
        return Position(address.offset)
    return Position(address.offset, Fence(envelope.term, envelope.sequence))


def move_back_to_oldest(
    bus: Bus, topic: str, positions: Mapping[int, Position], addresses: Iterable[Address]
) -> dict[int, Position]:
    """These positions, moved back to the oldest of these records if one is before them."""
    oldest: dict[int, Address] = {}
    for address in addresses:
        oldest[address.partition] = min(oldest.get(address.partition, address), address)
    before = dict(positions)
    for partition, address in oldest.items():
        if address.offset < before[partition].offset:
            before[partition] = position_before(bus, topic, address)
    return before


def _later(one: Position, other: Position | None) -> Position:
    """The position further on; at equal offsets the one that knows its fence."""
    if other is None:
        return one
    return max(one, other, key=lambda at: (at.offset, at.fence))
