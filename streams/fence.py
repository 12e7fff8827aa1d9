"""Decides which records of a single-holder role's topic count (invariant 7). Each record has its
writer's term and a sequence number per (term, partition); `Opened` has number 0. A reader keeps a
`Fence` per partition (the highest term whose `Opened` it read, and the next sequence number of that
term) and passes every record, in order, through the pure function `advance_fence`.

A reader that starts in the middle needs the fence there, so each stored `Position` carries it. The
other functions compute such positions, and truncate topics to them (invariant 11).
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
    """Returns the fence after a record, and whether the record counts (False: it is void). `opens`:
    the record is an `Opened`. `compacted`: the topic is compacted; compaction makes holes, so only
    terms and repeats are checked there. Raises `SequenceGap` if the log lost a record. Examples
    (`t2 #5` is record 5 of term 2, `Opened 2` the first record of term 2):

    * A zombie: `Opened 2`, then a late record of term 1 → void, because its writer was replaced.
    * An append that was repeated because its success was unknown: `t2 #5`, `t2 #5` → the repeat is
      void.
    * A repeat after the successor has opened: `t1 #5`, `Opened 2`, `t1 #5` → void by its term.
    * A lost record: `t2 #5`, `t2 #7` → `SequenceGap`, so no reader continues past a hole.
    * A lost opening: `t1 #5`, `t3 #4` → `SequenceGap` too.

    A reader that has no stored fence, only the empty `Fence()`, may start in the middle of a topic.
    The first record then sets its fence, which is `presumed` until an `Opened` is read: that record
    may be a zombie's, whose successor's `Opened` is before the point where the reader starts. So a
    presumed fence accepts a record of a higher term without its `Opened` (`t1 #9`, then `t2 #5`),
    which on any other fence is a lost opening.
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
"""Consumer groups under which dispatch commits the positions from which it can rebuild, and the
archive the positions up to which it has archived.
"""
REBUILD_TOPICS = ("admissions", "trajectories", "ledger", "applied")
"""Topics from which dispatch rebuilds its state and which other roles need too."""


def truncate(bus: Bus, topic: str, before: Mapping[int, Position]) -> dict[int, int]:
    """Remove the records below the positions `before`. Returns by partition the number of offsets
    removed. A position at or below the topic's present begin changes nothing.

    (1) The positions are committed with their fences; (2) the records are removed. A crash between
    the two steps only keeps records that no reader needs.

    Readers start from the committed positions (`truncated_begin`). Without the fence there a reader
    would count a zombie's record: say `Opened 3` is removed, and the first kept record was written
    after it by a zombie of term 2.
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
    """Commit again the positions below which the topic is truncated. To be called at least every
    few days: a Kafka broker drops a position, and with it the fence, `offsets.retention.minutes`
    (7 days by default) after its last commit.
    """
    known = bus.committed(TRUNCATED_GROUP, topic)
    if known:
        bus.commit(TRUNCATED_GROUP, topic, known)


def truncated_begin(bus: Bus, topic: str) -> dict[int, Position]:
    """Returns for each partition the position from which readers start, with the fence there: the
    position that `truncate` committed last, or the topic's begin if that is later.
    """
    known = bus.committed(TRUNCATED_GROUP, topic)
    begin = bus.begin(topic).items()
    return {p: _later(Position(offset), known.get(p)) for p, offset in begin}


def earliest_positions(candidates: Iterable[Mapping[int, Position]]) -> dict[int, Position]:
    """Returns the least position of each partition. Each candidate states the positions that one
    reader needs; a partition that any candidate lacks is left out, because it is unknown which of
    its records that reader needs.
    """
    bounds = list(candidates)
    if not bounds:
        return {}
    partitions = set(bounds[0]).intersection(*bounds[1:])
    return {p: min((b[p] for b in bounds), key=lambda at: at.offset) for p in sorted(partitions)}


def position_before(bus: Bus, topic: str, address: Address) -> Position:
    """Returns the position from which the record at `address` is the next one, with the fence
    before it. The record must be one that counts. Raises `PositionLost` if it was removed.
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
    """Returns the positions; in each partition with records at `addresses` before its position, the
    position of the oldest of these records instead.
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
    """Returns the position with the higher offset; at equal offsets the one with the higher
    fence.
    """
    if other is None:
        return one
    return max(one, other, key=lambda at: (at.offset, at.fence))
