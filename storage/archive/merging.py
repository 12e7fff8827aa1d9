"""Merges small archive files while others read them; `consumers/archive/compaction.py` deletes the
old ones (docs/reference/archive.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from rollstream.errors import RollstreamError
from rollstream.storage.archive.file_names import ArchiveFile, merged_key
from rollstream.storage.archive.files import ROW_GROUP_BYTES, EncodedFile, FileWriter
from rollstream.storage.archive.originals import OriginalBytes
from rollstream.storage.archive.reading import batches_from, file_end
from rollstream.storage.archive.schema import arrow_schema
from rollstream.storage.stores.base import ObjectStore


class NotMergeable(RollstreamError, ValueError):
    """The files cannot become one without a loss, and stay."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Consecutive files of one partition and day, and the last offset in them."""

    files: Sequence[ArchiveFile]
    last: int

    @property
    def key(self) -> str:
        return merged_key(self.files[0], self.last)


def plan_merges(files: Sequence[ArchiveFile], bytes_max: int, files_max: int) -> list[Merge]:
    """Returns the merges that are due among a topic's `current_files`. A partition's day that is
    over is merged as far as possible, its newest day only when it has more than `files_max` files.
    Merged files are disjoint or one contains the other, whichever process planned them and however
    old its listing was: readers rely on this alone.
    """
    merges: list[Merge] = []
    for _, partition in groupby(files, lambda file: file.partition):
        days = [list(day) for _, day in groupby(partition, lambda file: file.date)]
        ends = [day[0].first for day in days[1:]]
        for day, end in zip(days, [*ends, None], strict=True):
            if end is not None or len(day) > files_max:
                merges += _blocks(day, end, day[-1].first.bit_length(), bytes_max)
    return merges


def _blocks(
    files: Sequence[ArchiveFile], end: int | None, level: int, bytes_max: int
) -> Iterator[Merge]:
    """`end` is the first offset of the file after `files`; None if others of the block may come."""
    if len(files) < 2:
        return
    if end is not None and sum(file.bytes for file in files) <= bytes_max:
        yield Merge(files, end - 1)
        return
    # Block j of level m has the files whose first offset is in [j·2^m, (j+1)·2^m). It is merged
    # only when a file after it exists, so its files never change again. Without blocks a compactor
    # with an older listing could make a file of offsets 50–149 beside one of 0–99, and readers
    # would get rows twice.
    half = 1 << (level - 1)
    lower = [file for file in files if not file.first & half]
    upper = files[len(lower) :]
    yield from _blocks(lower, upper[0].first if upper else end, level - 1, bytes_max)
    yield from _blocks(upper, end, level - 1, bytes_max)


def merged_file(store: ObjectStore, merge: Merge) -> EncodedFile:
    """Returns all rows of a merge; each record's bytes have the row's hash. Memory holds one of the
    files, a row group and the result. Raises `NotMergeable` if offsets are missing or repeated, or
    for columns of a newer release, `CorruptObject`, `NewerRelease`, and `ObjectMissing` if a file
    was already merged and deleted.
    """
    topic, at = merge.files[0].topic, merge.files[0].first
    originals = OriginalBytes(topic)
    with FileWriter(topic) as writer:
        batches: list[pa.RecordBatch] = []
        for file, end in zip(
            merge.files, [*(f.first for f in merge.files[1:]), merge.last + 1], strict=True
        ):
            for batch in batches_from(store, file):
                at = _check_rows(batch, originals, at, file)
                batches.append(_conform(batch, topic, file))
                if sum(rows.nbytes for rows in batches) >= ROW_GROUP_BYTES:
                    writer.write(pa.Table.from_batches(batches))
                    batches = []
            # A suspended archiver may create a file again that was merged and deleted, with more
            # rows than before. The rows from `end` on are then in the next file too.
            if at != end:
                raise NotMergeable(f"{file.key} ends at offset {at - 1}, the next begins at {end}")
        if batches:
            writer.write(pa.Table.from_batches(batches))
        fence = file_end(store, merge.files[-1]).fence
        return writer.finish(merge.files[0].first, merge.last, fence)


def _check_rows(batch: pa.RecordBatch, originals: OriginalBytes, at: int, file: ArchiveFile) -> int:
    after = at + batch.num_rows
    if not np.array_equal(batch.column("offset").to_numpy(), np.arange(at, after)):
        raise NotMergeable(f"{file.key} does not hold each offset from {at} to {after - 1} once")
    for _ in originals.views(batch):
        pass
    return after


def _conform(batch: pa.RecordBatch, topic: str, file: ArchiveFile) -> pa.RecordBatch:
    schema, present = arrow_schema(topic), {f.name: f.type for f in batch.schema}
    newer = [name for name, type_ in present.items() if not _knows(schema, name, type_)]
    if newer:
        raise NotMergeable(f"{file.key} has columns of a newer release: {', '.join(newer)}")
    # Columns that an older release did not write are null.
    nulls = [None] * batch.num_rows
    columns: list[pa.Array] = [
        batch.column(f.name) if f.name in present else pa.array(nulls, f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _knows(schema: pa.Schema, name: str, type_: pa.DataType) -> bool:
    return name in schema.names and schema.field(name).type == type_
