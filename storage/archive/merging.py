"""Merges small archive files into larger ones while others read them, so that a long run has few.

`plan_merges` chooses the files to merge, and `merged_file` makes the file with their rows; this
module writes and deletes nothing. `consumers/archive/compaction.py` stores a merged file under a
name of its own and, after a grace period, deletes the files that it replaces. Of two merged files,
either they have no offset in common or one contains the other (`plan_merges`): readers rely on this
alone (`current_files`). docs/reference/archive.md ("Merged files") lists the interleavings.
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
    """Raised for files that cannot become one file without a loss, of rows or columns for example.
    The files stay as they are.
    """


@dataclass(frozen=True, slots=True)
class Merge:
    """Names the files to merge, two or more consecutive ones of one partition and day, and the last
    offset in them.
    """

    files: Sequence[ArchiveFile]
    last: int

    @property
    def key(self) -> str:
        """The key of the merged file in the store."""
        return merged_key(self.files[0], self.last)


def plan_merges(files: Sequence[ArchiveFile], bytes_max: int, files_max: int) -> list[Merge]:
    """Returns the merges that are due, each of at most `bytes_max`. `files` are a topic's
    `current_files`. A partition's day that is over is merged as far as possible, its newest day
    only when it has more than `files_max` files. The plan is a pure function (no I/O).

    Merges follow blocks of offsets: block j of level m has the day's files whose first offset is
    in [j·2^m, (j+1)·2^m). A block is merged only when a file after it exists, so its files never
    change again. Two blocks have no offset in common or one contains the other, since their sizes
    are powers of two; the same holds for merged files, whichever process planned them and however
    old its listing was. Without this rule a compactor with an older listing could make a file of
    offsets 50–149 beside one of 0–99, and readers would get rows twice.
    """
    found: list[Merge] = []
    for _, partition in groupby(files, lambda file: file.partition):
        days = [list(day) for _, day in groupby(partition, lambda file: file.date)]
        ends = [day[0].first for day in days[1:]]
        for day, end in zip(days, [*ends, None], strict=True):
            if end is not None or len(day) > files_max:
                found += _blocks(day, end, day[-1].first.bit_length(), bytes_max)
    return found


def _blocks(
    files: Sequence[ArchiveFile], end: int | None, level: int, bytes_max: int
) -> Iterator[Merge]:
    """Yields the merges within a block of this level, whose files are `files`. `end` is the first
    offset of the file after them; None if there is no such file, so that others of the block may
    follow.
    """
    if len(files) < 2:
        return
    if end is not None and sum(file.bytes for file in files) <= bytes_max:
        yield Merge(files, end - 1)
        return
    half = 1 << (level - 1)
    lower = [file for file in files if not file.first & half]
    upper = files[len(lower) :]
    yield from _blocks(lower, upper[0].first if upper else end, level - 1, bytes_max)
    yield from _blocks(upper, end, level - 1, bytes_max)


def merged_file(store: ObjectStore, merge: Merge) -> EncodedFile:
    """Returns the file with all rows of a merge, after checking that the bytes of each row's record
    have the row's hash. Memory holds one of the files, a row group and the result.

    Raises `NotMergeable` if offsets are missing or repeated, or for columns that this release does
    not know, `CorruptObject` for a damaged file, `NewerRelease` for one that this release does not
    understand, and `ObjectMissing` if a file was already merged and deleted.
    """
    topic, at = merge.files[0].topic, merge.files[0].first
    originals = OriginalBytes(topic)
    with FileWriter(topic) as writer:
        held: list[pa.RecordBatch] = []
        for file, end in zip(
            merge.files, [*(f.first for f in merge.files[1:]), merge.last + 1], strict=True
        ):
            for batch in batches_from(store, file):
                at = _check_rows(batch, originals, at, file)
                held.append(_conform(batch, topic, file))
                if sum(rows.nbytes for rows in held) >= ROW_GROUP_BYTES:
                    writer.write(pa.Table.from_batches(held))
                    held = []
            # A suspended archiver may create a file again that was merged and deleted, with more
            # rows than before. The rows from `end` on are then in the next file too.
            if at != end:
                raise NotMergeable(f"{file.key} ends at offset {at - 1}, the next begins at {end}")
        if held:
            writer.write(pa.Table.from_batches(held))
        fence = file_end(store, merge.files[-1]).fence
        return writer.finish(merge.files[0].first, merge.last, fence)


def _check_rows(batch: pa.RecordBatch, originals: OriginalBytes, at: int, file: ArchiveFile) -> int:
    """Returns the offset after these rows. Raises `NotMergeable` unless their offsets are `at`,
    `at` + 1 and so on, and `CorruptObject` for a row that differs from its hash.
    """
    after = at + batch.num_rows
    if not np.array_equal(batch.column("offset").to_numpy(), np.arange(at, after)):
        raise NotMergeable(f"{file.key} does not hold each offset from {at} to {after - 1} once")
    for _ in originals.views(batch):
        pass
    return after


def _conform(batch: pa.RecordBatch, topic: str, file: ArchiveFile) -> pa.RecordBatch:
    """Returns the rows in this release's columns; columns that an older release did not write are
    null. Raises `NotMergeable` for columns of a newer release.
    """
    schema, present = arrow_schema(topic), {f.name: f.type for f in batch.schema}
    newer = [name for name, type_ in present.items() if not _knows(schema, name, type_)]
    if newer:
        raise NotMergeable(f"{file.key} has columns of a newer release: {', '.join(newer)}")
    nulls = [None] * batch.num_rows
    columns: list[pa.Array] = [
        batch.column(f.name) if f.name in present else pa.array(nulls, f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _knows(schema: pa.Schema, name: str, type_: pa.DataType) -> bool:
    """Whether the schema has a column of this name and type."""
    return name in schema.names and schema.field(name).type == type_
