"""Decides which records of a single-holder role's topic count (invariant 7): a reader passes every
record, in order, through the pure function `advance_fence`. A reader that starts in the middle
needs the fence there, so each stored `Position` carries it; topics are truncated to such positions
(invariant 11).

Reading list: after `streams/writer.py`, before `streams/reader.py`.
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
    """Returns the fence after a record, and whether the record counts. `opens`: the record is an
    `Opened`. `compacted`: compaction makes holes, so only terms and repeats are checked. Raises
    `SequenceGap` if the log lost a record. Examples (`t2 #5` is record 5 of term 2, `Opened 2` the
    first record of term 2):

    * A zombie: `Opened 2`, then a late record of term 1 → void, because its writer was replaced.
    * An append repeated in doubt: `t2 #5`, `t2 #5` → the repeat is void.
    * A repeat after the successor has opened: `t1 #5`, `Opened 2`, `t1 #5` → void by its term.
    * A lost record: `t2 #5`, `t2 #7` → `SequenceGap`, so no reader continues past a hole.
    * A lost opening: `t1 #5`, `t3 #4` → `SequenceGap` too.

    A reader that starts in the middle has the fence `Fence()`, and after the first record one that
    is `presumed` until an `Opened` is read: that record may be a zombie's, whose successor's
    `Opened` is before the reader's start. So a presumed fence accepts a record of a higher term
    without its `Opened` (`t1 #9`, then `t2 #5`), which on any other fence is a lost opening.
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
"""Consumer group that stores the positions below which each topic is truncated."""
DISPATCH_GROUP, ARCHIVE_GROUP = "dispatch", "archive"
"""Positions from which dispatch can rebuild, and up to which the archive has archived."""
REBUILD_TOPICS = ("admissions", "trajectories", "ledger", "applied")
"""Topics from which dispatch rebuilds its state and which other roles need too."""


def truncate(bus: Bus, topic: str, before: Mapping[int, Position]) -> dict[int, int]:
    """Removes the records below `before`; a position at or below the topic's present begin changes
    nothing. Returns by partition the number of offsets removed.

    (1) The positions are committed with their fences; (2) the records are removed. A crash between
    the two steps only keeps records that no reader needs.
    """
    begin = bus.begin(topic)
    ahead = {p: at for p, at in before.items() if at.offset > begin[p]}
    if not ahead:
        return {}
    committed = bus.committed(TRUNCATED_GROUP, topic)
    # Readers start from here. Without the fence a reader would count a zombie's record: say `Opened
    # 3` is removed, and a zombie of term 2 wrote the first kept record after it.
    bus.commit(
        TRUNCATED_GROUP, topic, {p: later_position(at, committed.get(p)) for p, at in ahead.items()}
    )  # 1
    bus.truncate(topic, {p: at.offset for p, at in ahead.items()})  # 2
    return {p: at.offset - begin[p] for p, at in ahead.items()}


def renew_truncated(bus: Bus, topic: str) -> None:
    """Commits the positions again, every few days: a Kafka broker drops a position, with its fence,
    `offsets.retention.minutes` (7 days by default) after its last commit.
    """
    committed = bus.committed(TRUNCATED_GROUP, topic)
    if committed:
        bus.commit(TRUNCATED_GROUP, topic, committed)


def earliest_positions(candidates: Iterable[Mapping[int, Position]]) -> dict[int, Position]:
    """Returns the least positions. Each candidate states one reader's; a partition that any lacks
    is left out, because its needed records are unknown.
    """
    bounds = list(candidates)
    if not bounds:
        return {}
    partitions = set(bounds[0]).intersection(*bounds[1:])
    return {p: min((b[p] for b in bounds), key=lambda at: at.offset) for p in sorted(partitions)}


def position_before(bus: Bus, topic: str, address: Address) -> Position:
    """Returns the position with the fence before the record, which must count. Raises
    `PositionLost` if it was removed.
    """
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
    """Returns the positions, each moved back to its partition's oldest record at `addresses`."""
    oldest: dict[int, Address] = {}
    for address in addresses:
        oldest[address.partition] = min(oldest.get(address.partition, address), address)
    before = dict(positions)
    for partition, address in oldest.items():
        if address.offset < before[partition].offset:
            before[partition] = position_before(bus, topic, address)
    return before


def later_position(position: Position, other: Position | None) -> Position:
    if other is None:
        return position
    return max(position, other, key=lambda at: (at.offset, at.fence))
