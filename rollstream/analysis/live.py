"""The rows of a topic that the log has and the archive lacks, read once, up to the present end.

It only reads: no group is joined, nothing is buried in `<topic>.dead`. Rows are judged by the fence
of invariant 7 exactly as the archive judges them, from the fence behind the last archived row.
"""
# pyarrow ships no types
# pyright: reportUnknownVariableType=false

from collections.abc import Iterator, Mapping
from typing import Literal, cast

from rollstream.analysis.coverage import Hole
from rollstream.analysis.place import Place
from storage import log as storage_log
from storage.archive.columns import table_of
from storage.archive.rows import judge
from streams.bus import Bus, Message
from streams.connect import open_bus
from streams.errors import BusError, PositionLost
from streams.records import Fence, Position
from streams.truncation import truncated_begin

RECORDS_MAX = 8192
BYTES_MAX = 32 << 20  # of one batch of rows; DuckDB holds the rest, on disk if it must


def open_log(place: Place) -> Bus:
    """The run's log; the catalogue of topics is not made here, nor a store that is not there."""
    assert place.bus is not None
    sync = cast('Literal["normal", "full"]', place.sync)
    if not place.has_store:
        return open_bus(place.bus, sync=sync)
    return storage_log.open_log(place.bus, place.store, sync)


def has_topic(bus: Bus, topic: str) -> bool:
    """A run that was only prepared has no topics yet."""
    try:
        bus.settings(topic)
    except BusError:
        return False
    return True


def tables(bus: Bus, topic: str, hole: Hole, lost: list[Hole]) -> Iterator[object]:
    """The rows of the hole that the log holds, as the archive would hold them; what is gone is
    added to `lost`.
    """
    end = bus.end(topic).get(hole.partition, 0)
    end = end if hole.end is None else min(end, hole.end)
    start, fence = hole.start, Fence(hole.term, hole.sequence)
    kept = truncated_begin(bus, topic).get(hole.partition, Position())
    if kept.offset > start and start < end:
        lost.append(Hole(hole.partition, start, min(kept.offset, end)))
        start, fence = kept.offset, kept.fence
    fences: Mapping[int, Fence] = {hole.partition: fence}
    for messages in _messages(bus, topic, Hole(hole.partition, start, end), lost):
        judged = judge(topic, messages, fences)
        fences = judged.fences
        yield table_of(topic, messages, judged)


def _messages(bus: Bus, topic: str, hole: Hole, lost: list[Hole]) -> Iterator[list[Message]]:
    at, end = hole.start, hole.end or 0
    while at < end:
        try:
            read = bus.read(
                topic, {hole.partition: at}, records_max=RECORDS_MAX, bytes_max=BYTES_MAX
            )
        except PositionLost:  # truncated, perhaps just now
            begin = min(max(bus.begin(topic)[hole.partition], at + 1), end)
            lost.append(Hole(hole.partition, at, begin))
            at = begin
            continue
        messages = [message for message in read if message.offset < end]
        if not messages:
            return
        at = messages[-1].offset + 1
        yield messages
