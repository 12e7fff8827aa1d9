"""Reads the archive's files. A damaged one raises `CorruptObject`, one of a newer release
`NewerRelease`. A listed file may be merged and deleted before it is read (`ObjectMissing`); a new
listing has the larger one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import CorruptObject, NewerRelease, ObjectMissing, RollstreamError
from rollstream.storage.archive.file_names import (
    ArchiveFile,
    archive_prefix,
    current_files,
    parse_archive_key,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.read_only import FolderReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    from rollstream.streams.records import Fence

LISTINGS_MAX = 5  # attempts in a row, each with a new listing
TAIL_BYTES = 64 << 10  # usually contains a file's footer
BATCH_BYTES, BATCH_ROWS_MIN = 4 << 20, 64  # size of a batch of `batches_from`
BATCH_ROWS_MAX = 1 << 20  # a file whose footer states wrong sizes gives no larger batch
ROWS_MAX = 1 << 62  # no limit
_MAGIC = b"PAR1"
_PARQUET_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
DIGITS_MAX = 20  # read of a number in a file's metadata: no number of the archive has more


@dataclass(frozen=True, slots=True)
class FileEnd:
    """The last offset of a file, and the fence after it."""

    last: int
    fence: Fence


def archived_files(
    store: ObjectStore, run: str | None = None, topic: str | None = None
) -> list[ArchiveFile]:
    """Returns files that together hold each row once, ordered by topic, run, partition and first
    offset. Each file but a partition's newest may be merged and deleted at any time: at
    `ObjectMissing`, list again.
    """
    files = current_files(
        parse_archive_key(entry.key, entry.bytes)
        for entry in store.list(archive_prefix(topic, run))
    )
    return [file for file in files if run in (None, file.run)]


def partition_ends(store: ObjectStore, run: str, topic: str) -> dict[int, FileEnd]:
    """Returns how far each partition is archived; partitions without files are absent."""
    for attempts_left in reversed(range(LISTINGS_MAX)):
        newest = {file.partition: file for file in archived_files(store, run, topic)}
        try:
            return {partition: file_end(store, file) for partition, file in newest.items()}
        except ObjectMissing:  # since the listing newer files were written, and this one was merged
            if not attempts_left:
                raise
    raise AssertionError("unreachable")


def file_end(store: ObjectStore, file: ArchiveFile) -> FileEnd:
    from rollstream.storage.archive import files
    from rollstream.streams.records import Fence

    metadata = _metadata(store, file)
    try:
        first, last = int(metadata[files.FIRST]), int(metadata[files.LAST])
        term, _, sequence = metadata[files.FENCE].partition(":")
        fence = Fence(int(term), int(sequence), files.PRESUMED in metadata)
    except (KeyError, ValueError) as error:
        raise damaged_file(file, f"its metadata lack {error}") from error
    if first != file.first or last < first:
        raise damaged_file(file, f"it holds offsets {first} to {last}")
    return FileEnd(last, fence)


def table_from(
    store: ObjectStore, file: ArchiveFile, columns: Sequence[str] | None = None
) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = pa.BufferReader(store.get(file.key))
    with _damage_reported(file), pq.ParquetFile(data) as parquet:
        _check_form(file, parquet)
        table = parquet.read(columns=columns, use_threads=False)
        for batch in table.to_batches():
            _check_rows(file, batch)
        return table


def batches_from(
    store: ObjectStore,
    file: ArchiveFile,
    columns: Sequence[str] | None = None,
    row: int = 0,
    rows_max: int = ROWS_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows in order, in batches of about `BATCH_BYTES` of uncompressed values and at
    most `rows_max` rows; the first batch may begin before the row `row`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = local_path(store, file.key)
    is_here = path is not None and path.is_file()
    source = str(path) if is_here else pa.BufferReader(store.get(file.key))
    with _damage_reported(file), pq.ParquetFile(source) as parquet:
        _check_form(file, parquet)
        metadata = parquet.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        size = sum(max(0, group.total_byte_size) for group in groups)
        batch_rows = max(BATCH_ROWS_MIN, BATCH_BYTES * metadata.num_rows // max(1, size))
        batch_rows = min(batch_rows, rows_max, BATCH_ROWS_MAX)
        ends = list(accumulate(group.num_rows for group in groups))
        row_groups = [number for number, end in enumerate(ends) if end > row]
        # Batches so small reuse the same memory: half the CPU time of reading a whole row group.
        for batch in parquet.iter_batches(
            batch_rows, row_groups=row_groups, columns=columns, use_threads=False
        ):
            if batch.num_rows:
                _check_rows(file, batch)
                yield batch


def allocate_tables_with_malloc(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes pyarrow use malloc, unless the environment selects an allocator. It takes effect only
    before pyarrow is first imported.
    """
    # mimalloc, which pyarrow selects, keeps pages that hold a few live bytes: after merges of a few
    # MB a process held up to 70 MB more than with malloc.
    environment.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def release_memory() -> None:
    """Gives memory back, for processes that rarely read or write files: they would keep about as
    much as their largest files ever took.
    """
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None:  # without the module no table was ever made
        pyarrow.default_memory_pool().release_unused()


def tables(
    store: ObjectStore, files: Iterable[ArchiveFile], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    return (table_from(store, file, columns) for file in files)


def local_path(store: ObjectStore, key: str) -> Path | None:
    """Returns the object's path in a `file:` store, for readers that map files."""
    return store.path(key) if isinstance(store, FileStore | FolderReader) else None


def damaged_file(file: ArchiveFile, how: str) -> CorruptObject:
    reason = how.splitlines()[0] if how else "no reason given"
    return CorruptObject(
        f"archive file {file.key} is damaged ({reason}); put back a copy of it, or, if it is the "
        f"newest of its partition and the log still keeps {file.topic}/{file.partition} from "
        f"offset {file.first} on, move it away: `rollstream archive` writes it again"
    )


@contextmanager
def _damage_reported(file: ArchiveFile) -> Generator[None]:
    import pyarrow as pa

    try:
        yield
    except RollstreamError:
        raise
    except FileNotFoundError as error:
        raise ObjectMissing(f"no object {file.key}") from error
    # pyarrow also raises Python's errors: for a name that is not UTF-8, a number out of range, a
    # type that it cannot convert.
    except (pa.ArrowException, OSError, *_PARQUET_ERRORS) as error:
        raise damaged_file(file, str(error)) from error


def _check_form(file: ArchiveFile, parquet: ParquetFile) -> None:
    from rollstream.storage.archive.schema import misfit

    _refuse_newer(file, parquet.metadata.metadata or {})
    problem = misfit(file.topic, parquet.schema_arrow)
    if problem:
        raise damaged_file(file, problem)


def _check_rows(file: ArchiveFile, batch: pa.RecordBatch) -> None:
    from rollstream.storage.archive.schema import NOT_NULL, TEXT

    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.type == TEXT:
            column.validate(full=True)
    for name in NOT_NULL.intersection(batch.schema.names):
        if batch.column(name).null_count:
            raise damaged_file(file, f"its column {name} lacks values")
    if "offset" in batch.schema.names:
        offsets = batch.column("offset").to_numpy()
        if offsets[0] < file.first or (offsets[1:] <= offsets[:-1]).any():
            raise damaged_file(file, "its offsets do not ascend")


def _metadata(store: ObjectStore, file: ArchiveFile) -> dict[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tail = store.get(file.key, max(0, file.bytes - TAIL_BYTES), file.bytes)
    if len(tail) < 12 or tail[-4:] != _MAGIC:
        raise damaged_file(file, "it does not end as a Parquet file")
    footer = int.from_bytes(tail[-8:-4], "little") + 8
    if footer > len(tail):
        if footer > file.bytes:
            raise damaged_file(file, "its footer is longer than the file")
        tail = store.get(file.key, file.bytes - footer, file.bytes)
    with _damage_reported(file):
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + tail)).metadata or {}
    _refuse_newer(file, metadata)
    return {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in metadata.items()
    }


def _refuse_newer(file: ArchiveFile, metadata: Mapping[bytes, bytes]) -> None:
    from rollstream.storage.archive.files import SCHEMA
    from rollstream.storage.archive.schema import SCHEMA_NUMBER
    from rollstream.streams.release import upgrade_advice

    number = metadata.get(SCHEMA.encode(), b"")[:DIGITS_MAX]
    if number.isdigit() and int(number) > SCHEMA_NUMBER:
        raise NewerRelease(
            f"archive file {file.key} has columns of format {int(number)}, and formats up to "
            f"{SCHEMA_NUMBER} are known; {upgrade_advice('')}"
        )
