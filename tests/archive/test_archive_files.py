"""Archive files as other programs see them: names, contents, readers, and the errors on damaged
ones.
"""

import io
from pathlib import Path
from typing import Any, cast

import duckdb
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.errors import CorruptObject
from rollstream.storage.archive.file_names import (
    ArchiveFile,
    archive_key,
    parse_archive_key,
    utc_day,
)
from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.originals import FileMessages
from rollstream.storage.archive.reading import (
    BATCH_BYTES,
    archived_files,
    file_end,
    local_path,
    partition_ends,
    table_from,
)
from rollstream.storage.archive.rows import ARCHIVED_CLASSES
from rollstream.storage.archive.schema import arrow_schema
from rollstream.storage.archive.tables import records_of
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import Fence, Trajectory
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus, MemoryStore
from tests.archive.archive_samples import admission, append, archived_to, log_of, trajectory

FRIDAY_MS = 1_763_683_200_000  # 2025-11-21 00:00 UTC
SPARK_ENCODINGS = {"PLAIN", "RLE", "RLE_DICTIONARY", "BIT_PACKED"}
"""Spark 3.2 and later read these encodings in their vectorised reader; not BYTE_STREAM_SPLIT."""


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An archive of six trajectories on two days, in four partitions, and of the admissions."""
    clock = Clock(FRIDAY_MS / 1000 + 86_390)
    bus = MemoryBus(clock)
    bus.create(catalogue(2))
    store = open_store(f"file:{tmp_path}")
    for group in range(6):
        append(bus, "trajectories", [trajectory(group)], group % 2)
        clock.now_s += 5
    append(bus, "annotations", [])
    for topic in ("trajectories", "annotations"):
        archive = TopicArchive(bus, store, "tiny", topic, ArchiveSettings())
        archive.start()
        archive.finish()
    return tmp_path


def test_names_hold_topic_run_day_partition_and_first_offset_never_the_last() -> None:
    key = archive_key("trajectories", "run-1", 3, 1234, FRIDAY_MS + 86_399_999)
    assert key == (
        "archive/topic=trajectories/run=run-1/date=2025-11-21/"
        "trajectories-00003-00000000000000001234.parquet"
    )
    assert parse_archive_key(key, 7) == ArchiveFile(
        key, 7, "trajectories", "run-1", "2025-11-21", 3, 1234
    )
    assert parse_archive_key(key.replace(".parquet", ".json"), 7) is None
    assert parse_archive_key(key.replace("/trajectories-", "/ledger-"), 7) is None
    assert utc_day(-5) == 0  # a record with an invalid broker timestamp still has a day
    assert "date=9999-12-31" in archive_key("ledger", "r", 0, 0, 1 << 62)


def dated(table: pa.Table, date: str) -> list[tuple[int, str]]:
    """Group and the file's date; the records' own day must be the same."""
    days = {str(at.date()) for at in table.column("timestamp").to_pylist()}
    assert days == {date}
    return [(group, date) for group in table.column("group").to_pylist()]


def test_a_record_of_a_later_day_begins_a_new_file(folder: Path) -> None:
    """The records' own timestamps decide, whenever the archive ran."""
    files = archived_files(open_store(f"file:{folder}"), "tiny", "trajectories")
    store = open_store(f"file:{folder}")
    rows = [row for file in files for row in dated(table_from(store, file), file.date)]
    assert sorted(rows) == [
        (group, "2025-11-21" if group < 2 else "2025-11-22") for group in range(6)
    ]
    assert len(files) == 4  # two partitions, two days
    assert sum(archived_to(store, "tiny", "trajectories").values()) == 6


def test_a_clock_that_goes_back_over_midnight_makes_no_more_files() -> None:
    from rollstream.consumers.archive.topic import PendingRecords
    from rollstream.streams.bus import Message

    held = PendingRecords(0.0)
    for offset, minutes in enumerate((-1, 1, -1, 1, 2)):
        stamp = FRIDAY_MS + minutes * 60_000
        held.add(Message("applied", 0, offset, stamp, b"", b"x"))
    assert [m.offset for m in held.next_file()] == [0]
    held.drop_below(1)
    assert [m.offset for m in held.next_file()] == [1, 2, 3, 4]


def test_duckdb_reads_the_folder_as_it_is(folder: Path) -> None:
    found = duckdb.sql(
        f"""SELECT date::VARCHAR, count(*), sum(reward), sum(len(tokens)),
        min(spans[1].version.term)
        FROM read_parquet('{folder}/archive/**/*.parquet', hive_partitioning = true)
        WHERE run = 'tiny' AND topic = 'trajectories' GROUP BY date ORDER BY date"""
    ).fetchall()  # pyright: ignore[reportOptionalMemberAccess]
    assert found == [
        ("2025-11-21", 2, pytest.approx(0.1), 12, 1),
        ("2025-11-22", 4, pytest.approx(1.4), 24, 1),
    ]


def test_polars_reads_the_folder_as_it_is(folder: Path) -> None:
    frame = pl.scan_parquet(
        f"{folder}/archive/topic=trajectories/**/*.parquet", hive_partitioning=True
    ).sort("group").collect()  # fmt: skip
    assert frame["group"].to_list() == list(range(6))
    assert set(frame["run"]) == {"tiny"}
    assert frame["tokens"].dtype == pl.List(pl.UInt32)
    assert_array_equal(frame["logprobs"][0].to_numpy(), trajectory(0).logprobs)


def test_pandas_reads_the_folder_as_it_is(folder: Path) -> None:
    frame = pd.read_parquet(folder / "archive" / "topic=trajectories").sort_values("group")
    assert list(frame["reward"]) == [group / 10 for group in range(6)]
    assert_array_equal(frame["tokens"].iloc[2], trajectory(2).tokens)
    assert str(frame["timestamp"].dtype) == "datetime64[ms, UTC]"


@pytest.mark.parametrize("topic", ARCHIVED_CLASSES)
def test_files_hold_only_encodings_and_types_that_spark_reads(topic: str) -> None:
    """PySpark is a Java program and not installed here, so its limits are checked by name."""
    samples = {"trajectories": [trajectory(1)], "admissions": [admission(1)]}
    messages = log_of(topic, samples.get(topic, [])) or log_of("applied", [trajectory(1)])
    parquet = pq.ParquetFile(io.BytesIO(encode_file(topic, messages, Fence()).data))
    group = parquet.metadata.row_group(0)
    for index in range(group.num_columns):
        column = group.column(index)
        assert set(column.encodings) <= SPARK_ENCODINGS, column.path_in_schema
        assert column.compression in ("ZSTD", "UNCOMPRESSED")
        assert column.physical_type != "INT96"
        logical = str(parquet.schema.column(index).logical_type)
        assert not any(odd in logical for odd in ("nano", "Time(", "Float16", "UUID", "JSON"))
    assert group.num_rows == len(messages)


def compression_of(records: list[Trajectory]) -> dict[str, str]:
    parquet = pq.ParquetFile(
        io.BytesIO(encode_file("trajectories", log_of("trajectories", records), Fence()).data)
    )
    group = parquet.metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    return {column.path_in_schema: column.compression for column in columns}


def test_log_probabilities_are_compressed_where_that_makes_them_smaller() -> None:
    draw = np.random.default_rng(0)
    drawn = -draw.random(2048, dtype=np.float32)
    alike = np.repeat(drawn[:8], 256)
    for logprobs, wanted in ((drawn, "UNCOMPRESSED"), (alike, "ZSTD")):
        found = compression_of([msgspec.structs.replace(trajectory(1, 4096), logprobs=logprobs)])
        assert found.pop("logprobs.list.element") == wanted
        assert set(found.values()) == {"ZSTD"}


def test_statistics_let_readers_skip_row_groups(folder: Path) -> None:
    files = archived_files(open_store(f"file:{folder}"), "tiny", "trajectories")
    group = pq.ParquetFile(folder / files[0].key).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert columns["offset"].statistics.min == 0
    assert columns["trainer_version.number"].statistics.max == 3


def test_a_store_of_files_gives_the_path_and_any_store_the_table(folder: Path) -> None:
    store = open_store(f"file:{folder}")
    file = archived_files(store, topic="trajectories")[0]
    path = local_path(store, file.key)
    assert path is not None
    assert path.stat().st_size == file.bytes
    table = table_from(store, file)
    assert table.schema.equals(arrow_schema("trajectories"))
    assert all(isinstance(record, Trajectory) for record in records_of(table))
    narrow = table_from(store, file, ["offset", "reward"])
    assert narrow.column_names == ["offset", "reward"]
    other = MemoryStore()
    other.put(file.key, store.get(file.key))
    assert local_path(other, file.key) is None
    assert table_from(other, file).equals(table)


def store_with(data: bytes) -> tuple[ObjectStore, ArchiveFile]:
    store = MemoryStore()
    key = archive_key("trajectories", "tiny", 0, 0, FRIDAY_MS)
    store.create(key, data)
    return store, archived_files(store)[0]


def whole_file() -> bytes:
    messages = log_of("trajectories", [trajectory(group) for group in range(3)])
    return bytes(encode_file("trajectories", messages, Fence()).data)


@pytest.mark.parametrize("kept", [0, 3, 11, 200, -1, -9])
def test_a_truncated_file_is_named_with_what_to_do(kept: int) -> None:
    store, file = store_with(whole_file()[:kept])
    for read in (file_end, table_from):
        with pytest.raises(CorruptObject, match=f"{file.key} is damaged .*; put back a copy"):
            read(store, file)
    with pytest.raises(CorruptObject, match="move it away"):
        partition_ends(store, "tiny", "trajectories")


def test_a_damaged_footer_and_foreign_parquet_are_named_too() -> None:
    data = whole_file()
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(data)).replace_schema_metadata(), sink)
    renamed = bytes(
        encode_file("trajectories", log_of("trajectories", [trajectory(1)])[:1], Fence()).data
    )
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    damaged = data[:footer] + b"\x00" * 190 + data[footer + 190 :]
    for broken in (damaged, sink.getvalue(), b"PAR1" * 9):
        store, file = store_with(broken)
        with pytest.raises(CorruptObject, match="is damaged"):
            file_end(store, file)
    store = MemoryStore()
    store.create(archive_key("trajectories", "tiny", 0, 5, FRIDAY_MS), renamed)
    with pytest.raises(CorruptObject, match="holds offsets 0 to 0"):
        partition_ends(store, "tiny", "trajectories")


def test_data_that_changed_in_the_middle_is_found_when_it_is_read() -> None:
    """Parquet's pages have no checksum by default; zstd or a row's hash finds our damage."""
    from rollstream.storage.archive.tables import originals_of

    data = bytearray(whole_file())
    pages = pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(0)
    paths = [pages.column(i).path_in_schema for i in range(pages.num_columns)]
    column = pages.column(paths.index("logprobs.list.element"))
    data[column.data_page_offset + column.total_compressed_size - 2] ^= 0x40
    store, file = store_with(bytes(data))
    with pytest.raises(CorruptObject):
        list(originals_of(table_from(store, file), "trajectories"))


@pytest.mark.parametrize("columns", [["header"], ["header", "task"], ["hash"]])
def test_messages_of_rows_whose_header_is_damaged_come_from_their_columns(
    columns: list[str],
) -> None:
    given = log_of("trajectories", [trajectory(group) for group in range(5)])
    store, file = store_with(whole_file())
    table = pq.read_table(io.BytesIO(encode_file("trajectories", given, Fence()).data))
    for name in columns:
        index = table.schema.get_field_index(name)
        values = table.column(name).to_pylist()
        values[3] = values[3].replace(b"g", b"q") if name == "header" else f"{values[3]}?"
        field = table.schema.field(index)
        table = table.set_column(index, field, pa.array(values, field.type))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    store.put(file.key, sink.getvalue())
    if columns == ["header"]:
        found = FileMessages(store, "trajectories", file)
        assert found.since(0, 9) == given
        assert found.since(1, 2) == given[1:3]
        return
    with pytest.raises(CorruptObject, match="row 0:3 differs from its hash"):
        FileMessages(store, "trajectories", file).since(0, 1)


def test_a_reader_in_order_holds_one_part_of_a_file_and_may_go_back() -> None:
    given = log_of("trajectories", [trajectory(n, tokens=8_000) for n in range(600)])
    store, file = store_with(bytes(encode_file("trajectories", given, Fence()).data))
    messages = FileMessages(store, "trajectories", file)
    pool, held = cast("Any", pa).default_memory_pool(), list[int]()  # missing in the stubs
    for message in given:
        assert messages.since(message.offset, 1) == [message]
        held.append(pool.bytes_allocated())
    assert sum(len(message.value or b"") for message in given) > 6 * BATCH_BYTES
    assert max(held) <= held[0] + BATCH_BYTES
    assert messages.since(599, 5) == given[599:]
    assert messages.since(600, 5) == []
    for first in (0, 310, 3, 595, 594):
        assert messages.since(first, 150) == given[first : first + 150]
