"""Encodes archive files: consecutive messages of one partition as the bytes of a Parquet file
(`encode_file`), or rows that exist already, when files are merged (`FileWriter`).

The file's metadata hold the first and last offset, the fence after the last record, and the number
of the schema (`rollstream.first`, `.last`, `.fence`, `.presumed`, `.schema`), so an archiver that
continues the partition reads only the file's end. Common Parquet readers support all encodings
used; arrays are PLAIN: dictionaries take twice the time, and Spark supports BYTE_STREAM_SPLIT only
since 2026.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.storage.archive.file_names import message_bytes
from rollstream.storage.archive.rows import classify_rows
from rollstream.storage.archive.schema import SCHEMA_NUMBER, arrow_schema, topic_columns
from rollstream.storage.archive.tables import table_of
from rollstream.streams.bus import Message
from rollstream.streams.records import Fence

# `benchmarks/storage/archive.py` measures these choices.
ROW_GROUP_BYTES = 16 << 20  # of messages, as sized in the log; larger groups take more CPU time
WRITE_BATCH = 1 << 16  # values; pyarrow's default of 1 024 is an eighth of a trajectory
SAMPLE_BYTES = 256 << 10  # of each column of floats, compressed on trial
COMPRESSIBLE = 0.85
"""A column of floats is compressed if zstd reduces its sample to at most this share of its size.
Log-probabilities only reach 0.9, and to compress them would take a sixth of a file's time.
"""
FIRST, LAST, FENCE, PRESUMED, SCHEMA = (
    f"rollstream.{name}" for name in ("first", "last", "fence", "presumed", "schema")
)


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """Holds the bytes of one Parquet file, and the fence after its last record: the term in force
    there, and the sequence number that this term's next record has (`streams/fence.py`).
    """

    data: memoryview
    fence: Fence


class FileWriter:
    """Writes one file of a topic into memory: `write` for each row group, then `finish`. It is a
    context manager, which closes the file if an error ends the writing.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._sink = pa.BufferOutputStream()
        self._parquet: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Add the table as a row group. The first row group decides which columns of the whole file
        are compressed.
        """
        if self._parquet is None:
            options = write_options(self._topic, incompressible_columns(self._topic, table))
            self._parquet = pq.ParquetWriter(self._sink, arrow_schema(self._topic), **options)
        self._parquet.write_table(table, row_group_size=table.num_rows)

    def finish(self, first: int, last: int, fence: Fence) -> EncodedFile:
        """Returns the complete file; its metadata state that it holds the offsets `first` to
        `last`, with `fence` after them.
        """
        assert self._parquet is not None, "a file without rows"
        numbers = {FIRST: first, LAST: last, SCHEMA: SCHEMA_NUMBER}
        self._parquet.add_key_value_metadata(
            {name: str(number) for name, number in numbers.items()}
            | {FENCE: f"{fence.term}:{fence.sequence}"}
            | ({PRESUMED: "true"} if fence.presumed else {})
        )
        self._parquet.close()
        return EncodedFile(memoryview(self._sink.getvalue()), fence)

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._parquet is not None:
            self._parquet.close()


def encode_file(topic: str, messages: Sequence[Message], fence: Fence) -> EncodedFile:
    """Returns the file of these messages, one row each, whether they are valid records or not. They
    must be consecutive and of one partition; `fence` is the fence before the first one.

    Raises `SequenceGap` if the log lost a record of a single-holder role.
    """
    first, last = messages[0], messages[-1]
    assert last.offset - first.offset == len(messages) - 1, "the messages have a gap"
    with FileWriter(topic) as writer:
        for group in _row_groups(messages):
            classified = classify_rows(topic, group, {first.partition: fence})
            fence = classified.fences.get(first.partition, fence)
            writer.write(table_of(topic, group, classified))
        return writer.finish(first.offset, last.offset, fence)


def _row_groups(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yields the messages in groups of at most `ROW_GROUP_BYTES`, or one larger message."""
    start = taken = 0
    for index, message in enumerate(messages):
        if taken and taken + message_bytes(message) > ROW_GROUP_BYTES:
            yield messages[start:index]
            start, taken = index, 0
        taken += message_bytes(message)
    yield messages[start:]


def incompressible_columns(topic: str, table: pa.Table) -> frozenset[str]:
    """Returns the columns of floats that are not worth compressing: zstd leaves more than
    `COMPRESSIBLE` of a sample of their first values.
    """
    incompressible: set[str] = set()
    for column in topic_columns(topic):
        if column.is_array and pa.types.is_floating(column.items):
            values = table.column(column.name).chunk(0).values
            sample = values.slice(0, SAMPLE_BYTES // (column.items.bit_width // 8)).to_numpy()
            codec = cast("Any", pa).Codec("zstd")  # missing in the stubs
            if len(codec.compress(sample.tobytes())) > COMPRESSIBLE * sample.nbytes:
                incompressible.add(column.name)
    return frozenset(incompressible)


@cache
def write_options(topic: str, incompressible: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns pyarrow's options for a file of this topic. Arrays and the records' headers get no
    dictionary and no statistics; all columns but the `incompressible` ones are compressed by zstd.
    """
    leaves = [leaf for field in arrow_schema(topic) for leaf in _leaves(field.name, field.type)]
    plain = {"header", *(f"{c.name}.list.element" for c in topic_columns(topic) if c.is_array)}
    others = [leaf for leaf in leaves if leaf not in plain]
    uncompressed = {f"{name}.list.element" for name in incompressible}
    return {
        "compression": {leaf: "none" if leaf in uncompressed else "zstd" for leaf in leaves},
        "use_dictionary": others,
        "write_statistics": others,
        "write_batch_size": WRITE_BATCH,
    }


def _leaves(path: str, type_: pa.DataType) -> Iterator[str]:
    """Yields the Parquet paths of the columns that a field becomes."""
    if pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    elif pa.types.is_map(type_):
        yield from (f"{path}.key_value.{part}" for part in ("key", "value"))
    else:
        yield path
