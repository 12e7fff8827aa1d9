"""Reads the rows of a topic that the log holds and the archive lacks, up to the present end.

Read-only: it joins no consumer group and dead-letters nothing. Rows are validated with the fence of
invariant 7 exactly as the archive does, starting from the fence after the last archived row.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, cast

from rollstream.analysis.coverage import OffsetGap
from rollstream.analysis.locate import RunLocation
from rollstream.errors import BusError, PositionLost
from rollstream.storage import claim_check
from rollstream.storage.archive.rows import classify_rows
from rollstream.storage.archive.tables import table_of
from rollstream.streams.bus import Bus, Message
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Fence, Position
from rollstream.streams.truncation import truncated_begin

RECORDS_MAX = 8192
BYTES_MAX = 32 << 20  # per batch; DuckDB keeps earlier batches, spilling to disk if needed


def open_run_log(location: RunLocation) -> Bus:
    """Opens the run's log; creates neither topics nor a missing store."""
    assert location.bus is not None
    sync = cast('Literal["normal", "full"]', location.sync)
    if not location.has_store:
        return open_bus(location.bus, sync=sync)
    return claim_check.open_log(location.bus, location.store, sync)


def has_topic(bus: Bus, topic: str) -> bool:
    """False for a prepared run that never started: its topics do not exist yet."""
    try:
        bus.settings(topic)
    except BusError:
        return False
    return True


def log_tables(bus: Bus, topic: str, gap: OffsetGap, lost: list[OffsetGap]) -> Iterator[object]:
    """Yields the gap's rows that the log holds, in the archive's format. Offsets that the log
    lacks too are appended to `lost`.
    """
    end = bus.end(topic).get(gap.partition, 0)
    end = end if gap.end is None else min(end, gap.end)
    start, fence = gap.start, Fence(gap.term, gap.sequence)
    kept = truncated_begin(bus, topic).get(gap.partition, Position())
    if kept.offset > start and start < end:
        lost.append(OffsetGap(gap.partition, start, min(kept.offset, end)))
        start, fence = kept.offset, kept.fence
    fences: Mapping[int, Fence] = {gap.partition: fence}
    for messages in _messages(bus, topic, OffsetGap(gap.partition, start, end), lost):
        classified = classify_rows(topic, messages, fences)
        fences = classified.fences
        yield table_of(topic, messages, classified)


def _messages(
    bus: Bus, topic: str, gap: OffsetGap, lost: list[OffsetGap]
) -> Iterator[list[Message]]:
    at, end = gap.start, gap.end or 0
    while at < end:
        try:
            read = bus.read(
                topic, {gap.partition: at}, records_max=RECORDS_MAX, bytes_max=BYTES_MAX
            )
        except PositionLost:  # truncated, perhaps during this read
            begin = min(max(bus.begin(topic)[gap.partition], at + 1), end)
            lost.append(OffsetGap(gap.partition, at, begin))
            at = begin
            continue
        messages = [message for message in read if message.offset < end]
        if not messages:
            return
        at = messages[-1].offset + 1
        yield messages
