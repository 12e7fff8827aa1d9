"""Encodes consecutive messages of one partition, or rows of files that are merged (`FileWriter`),
as a Parquet file.
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
"""A column of floats is compressed if zstd reduces its sample to at most this share;
log-probabilities reach 0.9.
"""
FIRST, LAST, FENCE, PRESUMED, SCHEMA = (
    f"rollstream.{name}" for name in ("first", "last", "fence", "presumed", "schema")
)


@dataclass(frozen=True, slots=True)
class EncodedFile:
    data: memoryview
    fence: Fence


class FileWriter:
    """One file in memory: `write` for each row group, then `finish`. The context manager closes it
    after an error.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._sink = pa.BufferOutputStream()
        self._parquet: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Adds a row group; the first decides which columns of the file are compressed."""
        if self._parquet is None:
            options = write_options(self._topic, incompressible_columns(self._topic, table))
            self._parquet = pq.ParquetWriter(self._sink, arrow_schema(self._topic), **options)
        self._parquet.write_table(table, row_group_size=table.num_rows)

    def finish(self, first: int, last: int, fence: Fence) -> EncodedFile:
        assert self._parquet is not None, "a file without rows"
        # An archiver that continues a partition reads only these, at the file's end.
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
    """Returns the file of these messages, valid records or not, consecutive and of one partition;
    `fence` is the one before them. Raises `SequenceGap` if the log lost a record of a single-holder
    role.
    """
    first, last = messages[0], messages[-1]
    assert last.offset - first.offset == len(messages) - 1, "the messages have a gap"
    with FileWriter(topic) as writer:
        for group in _row_groups(messages):
            rows, after = classify_rows(topic, group, {first.partition: fence})
            fence = after.get(first.partition, fence)
            writer.write(table_of(topic, group, rows))
        return writer.finish(first.offset, last.offset, fence)


def _row_groups(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    start = taken = 0
    for index, message in enumerate(messages):
        if taken and taken + message_bytes(message) > ROW_GROUP_BYTES:
            yield messages[start:index]
            start, taken = index, 0
        taken += message_bytes(message)
    yield messages[start:]


def incompressible_columns(topic: str, table: pa.Table) -> frozenset[str]:
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
    leaves = [leaf for field in arrow_schema(topic) for leaf in _leaves(field.name, field.type)]
    plain = {"header", *(f"{c.name}.list.element" for c in topic_columns(topic) if c.is_array)}
    others = [leaf for leaf in leaves if leaf not in plain]
    uncompressed = {f"{name}.list.element" for name in incompressible}
    # All Parquet readers support these. Arrays are PLAIN, without statistics: dictionaries take
    # twice the time, and Spark supports BYTE_STREAM_SPLIT only since 2026.
    return {
        "compression": {leaf: "none" if leaf in uncompressed else "zstd" for leaf in leaves},
        "use_dictionary": others,
        "write_statistics": others,
        "write_batch_size": WRITE_BATCH,
    }


def _leaves(path: str, type_: pa.DataType) -> Iterator[str]:
    if pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    elif pa.types.is_map(type_):
        yield from (f"{path}.key_value.{part}" for part in ("key", "value"))
    else:
        yield path
