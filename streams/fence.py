"""Decides by a pure function which records of a single-holder role's topic count (invariant 7), and
truncates topics so that the fence at the new begin is kept (invariant 11).

A record carries its writer's term and a sequence number per (term, partition); `Opened` has number
0. A reader keeps a `Fence` (the highest term whose `Opened` it read, and the next sequence number
expected of that term) and passes every record through `advance_fence` in partition order.
"""

from collections.abc import Iterable, Mapping

from rollstream.errors import PositionLost, SequenceGap
from rollstream.streams.bus import Bus
from rollstream.streams.codec import Envelope, envelope_of
from rollstream.streams.records import Fence, Position
from rollstream.streams.values import Address


def advance_fence(
    fence: Fence, envelope: Envelope, *, opens: bool, compacted: bool
) -> tuple[Fence, bool]:
    """Return the fence after a record, and whether the record counts (False: it is void). `opens`:
    the record is an `Opened`. `compacted`: the topic is compacted; compaction makes holes, so only
    terms and repeats are checked there. Raises `SequenceGap` if the log lost a record.

    * A zombie: `Opened 2`, then a late record of term 1 → void, because its writer was replaced.
    * An append in doubt that was repeated: `t2 #5`, `t2 #5` → the repeat is void.
    * A repeat after the successor has opened: `t1 #5`, `Opened 2`, `t1 #5` → void by its term.
    * A lost record: `t2 #5`, `t2 #7` → `SequenceGap`, so no reader continues past a hole.
    * A lost opening: `t1 #5`, `t3 #4` → `SequenceGap` too.

    A reader without a stored fence (`Fence()`) starts in the middle: the first record sets its
    fence, which is `presumed` until an `Opened` is read. That record may be a zombie's, written
    after an `Opened` that is before the reader's begin: `t1 #9`, `t2 #5`. So a higher term raises a
    presumed fence without an `Opened`; on any other fence the same sequence is a lost opening.
    """
    presumed = not opens and (fence.presumed or fence == Fence())
    after = Fence(envelope.term, envelope.sequence + 1, presumed)
    if envelope.term < fence.term:
        return fence, False
    if envelope.term > fence.term:
        if not (opens or compacted or presumed):
            raise SequenceGap(
                f"{envelope.role} term {envelope.term} wrote #{envelope.sequence} before any "
                f"`Opened` of it was read (fence at term {fence.term}); the log lost a record"
            )
        return after, True
    if envelope.sequence < fence.sequence:
        return fence, False
    if envelope.sequence > fence.sequence and not compacted:
        raise SequenceGap(
            f"{envelope.role} term {envelope.term} wrote #{envelope.sequence} where "
            f"#{fence.sequence} comes next; the log lost a record"
        )
    return after, True


TRUNCATED_GROUP = "truncated"
"""Consumer group that holds the positions below which a topic is truncated."""
DISPATCH_GROUP, ARCHIVE_GROUP = "dispatch", "archive"
"""Consumer groups under which dispatch commits the positions from which it can rebuild, and the
archive the positions up to which it has archived.
"""
REBUILD_TOPICS = ("admissions", "trajectories", "ledger", "applied")
"""Topics from which dispatch rebuilds its state and which other roles need too."""


def truncate(bus: Bus, topic: str, before: Mapping[int, Position]) -> dict[int, int]:
    """Remove records below `before`. Returns by partition the number of offsets removed.

    (1) The positions are committed with their fences; (2) the records are removed. A crash between
    the two steps only keeps records that no reader needs. A position at or below the present begin
    changes nothing.

    Without the stored fence a reader would count a zombie's record: `Opened 3` is truncated, and
    the first kept record was written after it by a zombie of term 2. So readers start from the
    committed positions (`truncated_begin`).
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


def renew_truncated(bus: Bus, topic: str) -> None:
    """Commit again the positions below which the topic is truncated. A broker drops a position, and
    with it the fence, `offsets.retention.minutes` after its last commit.
    """
    known = bus.committed(TRUNCATED_GROUP, topic)
    if known:
        bus.commit(TRUNCATED_GROUP, topic, known)


def truncated_begin(bus: Bus, topic: str) -> dict[int, Position]:
    """Return the positions of the first records that count, with the fence there."""
    known = bus.committed(TRUNCATED_GROUP, topic)
    begin = bus.begin(topic).items()
    return {p: _later(Position(offset), known.get(p)) for p, offset in begin}


def earliest_positions(candidates: Iterable[Mapping[int, Position]]) -> dict[int, Position]:
    """Return the least position of each partition. A partition that any candidate lacks is left
    out, because it is unknown which of its records that candidate needs.
    """
    bounds = list(candidates)
    if not bounds:
        return {}
    partitions = set(bounds[0]).intersection(*bounds[1:])
    return {p: min((b[p] for b in bounds), key=lambda at: at.offset) for p in sorted(partitions)}


def position_before(bus: Bus, topic: str, address: Address) -> Position:
    """Return the position of a record that counts, with the fence before it."""
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
    """Return these positions, moved back to the oldest of the records at `addresses` where one is
    before them.
    """
    oldest: dict[int, Address] = {}
    for address in addresses:
        oldest[address.partition] = min(oldest.get(address.partition, address), address)
    before = dict(positions)
    for partition, address in oldest.items():
        if address.offset < before[partition].offset:
            before[partition] = position_before(bus, topic, address)
    return before


def _later(one: Position, other: Position | None) -> Position:
    """Return the position with the higher offset; at equal offsets the one with the higher
    fence.
    """
    if other is None:
        return one
    return max(one, other, key=lambda at: (at.offset, at.fence))
