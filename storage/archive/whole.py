"""A topic from its very first record: archived rows below the first kept record, then the log
itself.

Each record is returned once, by its offset. Records that are neither archived nor kept (in a run
without an archive) are skipped.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping

from rollstream.storage.archive.reading import archived_files, table_from
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.errors import PositionLost
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Opened, Position, Record

RECORDS_MAX = 1024  # of one read


def whole_topic(bus: Bus, store: ObjectStore, run: str, topic: str) -> Iterator[Record]:
    """All records of the topic up to its present end, without void ones, in the order of each
    partition.
    """
    ends = bus.end(topic)
    positions = {partition: Position(0) for partition in ends}
    while True:
        begin = from_begin(bus, topic)
        yield from _archived(store, run, topic, positions, begin)
        for partition, at in begin.items():
            if positions[partition].offset < at.offset:
                positions[partition] = at
        reader = TopicReader(bus, topic, positions)
        try:
            yield from _live(reader, ends)
        except PositionLost:  # truncated meanwhile: those records are archived
            positions = dict(reader.positions)
            continue
        return


def _live(reader: TopicReader, ends: Mapping[int, int]) -> Iterator[Record]:
    while any(at.offset < ends[partition] for partition, at in reader.positions.items()):
        before = dict(reader.positions)
        yield from (one.record for one in reader.poll(0.0, RECORDS_MAX))
        if reader.positions == before:  # the remaining records were compacted away
            return


def _archived(
    store: ObjectStore,
    run: str,
    topic: str,
    start: Mapping[int, Position],
    end: Mapping[int, Position],
) -> Iterator[Record]:
    """Records of archived rows from `start` on and below `end`."""
    if all(start[partition].offset >= end[partition].offset for partition in start):
        return
    from rollstream.storage.archive.tables import records_of  # pyarrow, needed only for archived rows

    for file in archived_files(store, run, topic):
        low, high = start[file.partition].offset, end[file.partition].offset
        if file.first >= high:
            continue
        table = table_from(store, file)
        skipped = min(table.num_rows, max(0, low - file.first))  # rows are contiguous offsets
        wanted = min(table.num_rows, high - file.first) - skipped
        records = records_of(table.slice(skipped, max(0, wanted)))
        yield from (record for record in records if not isinstance(record, Opened))
