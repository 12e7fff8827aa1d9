"""Archive files of somebody else: rows, or `CorruptObject` and `NewerRelease`, for damaged bytes,
columns of odd types, missing values and offsets that do not ascend.
"""

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from rollstream.errors import CorruptObject, RollstreamError
from rollstream.storage.archive.file_names import ArchiveFile, archive_key, parse_archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.log import ArchiveBus
from rollstream.storage.archive.originals import OriginalBytes, batches_of
from rollstream.storage.archive.reading import file_end, table_from
from rollstream.storage.archive.segments import ArchivedRows
from rollstream.storage.archive.tables import records_of
from rollstream.streams.records import SCHEMAS, Fence, Opened
from rollstream.streams.topics import ARCHIVED_TOPICS
from testbed.memory import MemoryStore
from testbed.sample_records import SAMPLES
from tests.archive.archive_samples import log_of, message
from tests.edges.fuzz.damage import Draw, changed_bytes, checked, examples

arrow: Any = pa  # its stubs have only what the product uses
KEY = archive_key("trajectories", "r", 0, 0, 1000)
TRAJECTORIES = [s for s in SAMPLES if s.schema() == "trajectory/1"]


def _messages(topic: str):
    from rollstream.storage.archive.rows import ARCHIVED_CLASSES

    records = [s for s in SAMPLES if type(s) in ARCHIVED_CLASSES[topic] and type(s) is not Opened]
    found = log_of(topic, (records * 4)[:6])
    return [*found, message(topic, len(found), None), message(topic, len(found) + 1, b"junk")]


FILES = {
    topic: bytes(encode_file(topic, _messages(topic), Fence(1, 0)).data)
    for topic in ARCHIVED_TOPICS
}
TABLES = {topic: pq.read_table(io.BytesIO(data)) for topic, data in FILES.items()}


def read_all(topic: str, data: bytes) -> None:
    """Read a file in every way that a viewer does."""
    store, key = MemoryStore(), archive_key(topic, "r", 0, 0, 1000)
    store.put(key, data)
    file = parse_archive_key(key, len(data))
    assert file is not None
    ways: list[Callable[[], object]] = [
        lambda: file_end(store, file),
        lambda: list(records_of(table_from(store, file), with_void=True)),
        lambda: [list(rows(batch, file).records()) for batch in batches_of(store, file)],
        lambda: [rows(batch, file).fence for batch in batches_of(store, file, ["schema"])],
        lambda: [list(OriginalBytes(topic).values(batch)) for batch in batches_of(store, file)],
        lambda: _read_as_log(store, topic),
    ]
    for way in ways:
        checked(way)


def rows(batch: pa.RecordBatch, file: ArchiveFile) -> ArchivedRows:
    return ArchivedRows(file.topic, file.partition, batch, file.key)


def _read_as_log(store: MemoryStore, topic: str) -> None:
    bus = ArchiveBus(None, store, "r")
    at, end = 0, bus.end(topic)[0]
    for _ in range(20):
        if at >= end:
            return
        found = bus.read(topic, {0: at}, records_max=3)
        at = found[-1].offset + 1


def written(table: pa.Table, version: str = "2.6") -> bytes:
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(), sink, version=version)  # pyright: ignore[reportArgumentType]
    return sink.getvalue()


@given(st.sampled_from(ARCHIVED_TOPICS), st.data())
@examples(60)
def test_a_file_with_damaged_bytes_is_read_or_refused(topic: str, data: st.DataObject) -> None:
    sample = FILES[topic]
    footer = int.from_bytes(sample[-8:-4], "little")
    if data.draw(st.booleans()):  # the footer: sizes, types, places of columns
        head, tail = sample[: -8 - footer], sample[-8 - footer : -8]
        tail = changed_bytes(data.draw, tail)
        read_all(topic, head + tail + len(tail).to_bytes(4, "little") + b"PAR1")
    else:
        body = changed_bytes(data.draw, sample[:-8])
        read_all(topic, body + sample[-8:])


ODD_TYPES = [
    arrow.int8(),
    arrow.uint64(),
    arrow.float32(),
    arrow.float64(),
    arrow.bool_(),
    arrow.string(),
    arrow.large_string(),
    arrow.binary(),
    arrow.timestamp("ns"),
    arrow.timestamp("us", tz="UTC"),
    arrow.date32(),
    arrow.decimal128(9),
    arrow.list_(arrow.int64()),
    arrow.list_(arrow.uint32()),
    arrow.large_list(arrow.uint32()),
    arrow.struct([("x", arrow.int8())]),
    arrow.map_(arrow.string(), arrow.int64()),
    arrow.null(),
    arrow.binary(4),
    arrow.dictionary(arrow.int8(), arrow.string()),
]


def _odd_column(draw: Draw, type_: Any, rows: int) -> Any:
    """A column of any type, with values that are nulls, empty or small."""
    if arrow.types.is_dictionary(type_):
        return arrow.array(["x"] * rows).dictionary_encode()
    texts = arrow.types.is_string(type_) or arrow.types.is_large_string(type_)
    if texts or arrow.types.is_binary(type_):
        value: object = draw(st.sampled_from(["x", "", "trajectory/1", "opened/1"]))
        value = value if texts else str(value).encode()
    elif arrow.types.is_nested(type_) or arrow.types.is_fixed_size_binary(type_):
        value = None
    elif arrow.types.is_boolean(type_):
        value = True
    else:
        value = draw(st.sampled_from([0, 1, 100]))
    values = [draw(st.sampled_from([value, value, None])) for _ in range(rows)]
    try:
        return arrow.array(values, type_)
    except (arrow.ArrowException, TypeError, ValueError):
        return arrow.nulls(rows, type_)


@given(st.sampled_from(ARCHIVED_TOPICS), st.data())
@examples(80)
def test_a_file_with_odd_columns_is_read_or_refused(topic: str, data: st.DataObject) -> None:
    table = TABLES[topic]
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(table.column_names))
        at = table.column_names.index(name)
        how = data.draw(st.sampled_from(["type", "type", "drop", "twice", "nulls", "shuffle"]))
        column = table.column(at)
        if how == "drop":
            other: Any = table
            table = other.remove_column(at)
        elif how == "twice":
            table = table.append_column(pa.field(name, column.type), column)
        elif how == "nulls":
            table = table.set_column(at, name, arrow.nulls(len(table), column.type))
        elif how == "shuffle":
            order = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=9))
            table = table.take(pa.array(order))
        else:
            odd = _odd_column(data.draw, data.draw(st.sampled_from(ODD_TYPES)), len(table))
            table = table.set_column(at, name, odd)
        if not table.num_columns:
            return
    read_all(topic, written(table))


def _changed(name: str, values: pa.Array) -> bytes:
    table = TABLES["trajectories"]
    return written(table.set_column(table.column_names.index(name), name, values))


def test_each_lie_of_a_column_is_refused_by_the_name_of_its_file() -> None:
    table = TABLES["trajectories"]
    rows = len(table)
    lies = {
        "timestamp": pa.array([10**15] * rows, pa.timestamp("ns")),
        "offset": pa.array([0] * rows, pa.int64()),
        "key": pa.array([b"\xff"] * rows, pa.binary()),
        "void": pa.array([None] * rows, pa.bool_()),
        "tokens": pa.array([["x"]] * rows, pa.list_(pa.string())),
        "group": pa.array([None] * rows, pa.int64()),
        "finish": pa.array(["eaten"] * rows, pa.string()),
    }
    for name, values in lies.items():
        store, data = MemoryStore(), _changed(name, values)
        store.put(KEY, data)
        file = parse_archive_key(KEY, len(data))
        assert file is not None
        with pytest.raises(CorruptObject):
            list(records_of(table_from(store, file), with_void=True))


@pytest.mark.parametrize("name", ["void", "schema", "offset", "key", "tokens"])
def test_a_file_that_lacks_a_column_is_refused(name: str) -> None:
    table = TABLES["trajectories"]
    store, data = MemoryStore(), written(table.drop_columns([name]))
    store.put(KEY, data)
    file = parse_archive_key(KEY, len(data))
    assert file is not None
    with pytest.raises(CorruptObject, match=name):
        list(records_of(table_from(store, file), with_void=True))


def test_texts_of_metadata_are_no_numbers() -> None:
    table = TABLES["trajectories"]
    for number in ("9" * 5000, "-1", "1e9", "\u0661"):
        names = ("first", "last", "fence", "schema")
        metadata = {f"rollstream.{name}": number for name in names}
        sink = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
        store, data = MemoryStore(), sink.getvalue()
        store.put(KEY, data)
        file = parse_archive_key(KEY, len(data))
        assert file is not None
        with pytest.raises(RollstreamError, match="trajectories-00000"):
            file_end(store, file)


KEY_PARTS = st.sampled_from(
    ["archive", "topic=trajectories", "run=r", "date=2026-11-21", "date=9999-99-99", "..", "",
     "trajectories-00000-00000000000000000000.parquet", "topic=", "run=\n", "9" * 3000]
)  # fmt: skip


@given(st.lists(KEY_PARTS, max_size=7).map("/".join) | st.text(max_size=40))
@examples(60)
def test_any_key_is_a_file_or_none(key: str) -> None:
    file = parse_archive_key(key, 5)
    assert file is None or (file.key == key and file.first >= 0)


def test_the_samples_cover_every_archived_schema() -> None:
    assert all(len(table) > 2 for table in TABLES.values())
    assert len(SCHEMAS) == len({sample.schema() for sample in SAMPLES})
