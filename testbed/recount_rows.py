"""Records of a run as plain rows, read without the product's code: SQLite tables, Kafka's records,
Parquet columns. It relies on docs/reference/wire-format.md and docs/reference/archive.md alone.
"""

import json
import re
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

_FILE = re.compile(r"\w+-(\d{5})-\d{20}(?:-\d{20})?\.parquet")
_ARRAY = re.compile(r"(\w+):([uif][1248])")


@dataclass
class Row:
    """One record of a topic; `fields` are the header's and the arrays under their plain names."""

    partition: int
    offset: int
    schema: str
    fields: dict[str, Any]
    term: int | None = None
    sequence: int | None = None


@dataclass
class Places:
    """The places of a run; any of them may be missing."""

    sqlite: Path | None = None
    kafka: str = ""
    store: Path | None = None
    run: str = ""
    max_lag: int | None = None


# ---- bytes ---------------------------------------------------------------------------------------


def decode(value: bytes) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Fields and envelope of a record; None for bytes that cannot be decoded."""
    if value[:4] != b"RSR1" or len(value) < 16:
        return None
    (size,) = struct.unpack_from("<I", value, 4)
    try:
        header = json.loads(value[16 : 16 + size])
    except ValueError:
        return None
    fields: dict[str, Any] = {}
    at = 16 + size
    for key, stated in header["record"].items():
        match = _ARRAY.fullmatch(key)
        if match is None:
            fields[key] = stated
            continue
        at += -at % 8
        dtype = np.dtype("<" + match[2])
        fields[match[1]] = np.frombuffer(value, dtype, stated, at)
        at += stated * dtype.itemsize
    return fields, header.get("envelope") or {}


def row_of(partition: int, offset: int, value: bytes | None, store: Path | None) -> Row | None:
    """The record at this position, with its large bytes fetched from the store."""
    decoded = None if value is None else decode(value)
    if decoded is not None and decoded[0].get("schema") == "claim/1" and store is not None:
        blob = store / decoded[0]["blob"]
        decoded = decode(blob.read_bytes()) if blob.exists() else None
    if decoded is None:
        return None
    fields, envelope = decoded
    schema = str(fields.get("schema"))
    return Row(partition, offset, schema, fields, envelope.get("term"), envelope.get("sequence"))


# ---- places --------------------------------------------------------------------------------------


def sqlite_rows(folder: Path, topic: str, store: Path | None) -> Iterator[Row | int]:
    """A topic's records; an int before each partition's is its first offset."""
    with sqlite3.connect(f"file:{folder / topic}.db?mode=ro", uri=True) as connection:
        begins = connection.execute("SELECT partition, begin FROM begins ORDER BY 1").fetchall()
        for partition, begin in begins:
            yield begin
            for first, count, keys, values, sizes in connection.execute(
                f"SELECT first, count, key, value, sizes FROM log_{partition} ORDER BY first"
            ):
                for offset, value in unpacked(first, count, keys, values, sizes):
                    row = row_of(partition, offset, value, store) if offset >= begin else None
                    if row is not None:
                        yield row
    connection.close()


def unpacked(
    first: int, count: int, keys: bytes, values: bytes | None, sizes: bytes | None
) -> Iterator[tuple[int, bytes | None]]:
    """Offsets and values of one row of the table."""
    if sizes is None or values is None:
        yield first, values
        return
    lengths = struct.unpack(f"<{2 * count}I", sizes)[count:]
    for number, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        yield first + number, values[start:end]


def kafka_rows(url: str, topic: str, store: Path | None) -> Iterator[Row | int]:
    """The same of a broker's topic, up to its present end."""
    from kafka import KafkaConsumer, TopicPartition

    servers, _, prefix = url.partition("?")[0].removeprefix("kafka://").partition("/")
    name = f"{prefix}.{topic}" if prefix else topic
    consumer = KafkaConsumer(bootstrap_servers=servers.split(","), enable_auto_commit=False)
    try:
        for partition in sorted(consumer.partitions_for_topic(name) or ()):
            one = TopicPartition(name, partition)
            consumer.assign([one])
            begin, end = consumer.beginning_offsets([one])[one], consumer.end_offsets([one])[one]
            yield begin
            consumer.seek(one, begin)
            while consumer.position(one) < end:
                for records in consumer.poll(timeout_ms=1000).values():
                    for record in records:
                        row = row_of(partition, record.offset, record.value, store)
                        if row is not None and record.offset < end:
                            yield row
    finally:
        consumer.close()


def archive_rows(store: Path, run: str, topic: str) -> Iterator[Row]:
    """The archive's rows, by partition and offset; a merged file comes before those in it."""
    import pyarrow.parquet as parquet

    places = (store / "archive" / f"topic={topic}" / f"run={run}").glob("*/*.parquet")
    after: dict[str, int] = {}
    for path in sorted(places, key=lambda path: path.name):
        match = _FILE.fullmatch(path.name)
        assert match, path
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(use_threads=False):
                for line in batch.to_pylist(maps_as_pydicts="strict"):
                    if line["offset"] >= after.get(match[1], 0):
                        after[match[1]] = line["offset"] + 1
                        yield archived_row(line)


def archived_row(line: dict[str, Any]) -> Row:
    """The record of a row; rows whose bytes the columns do not give carry them."""
    at = line["partition"], line["offset"]
    if line["original"] is not None and line["reason"] is None:
        row = row_of(*at, line["original"], None)
        assert row is not None
        return row
    schema = "" if line["reason"] is not None else line["schema"] or ""
    return Row(*at, schema, line, line["term"], line["sequence"])


def rows(places: Places, topic: str) -> Iterator[Row]:
    """Archived rows below the log's begin, then the log's."""
    log: list[Row] = []
    begins: list[int] = []
    if places.sqlite is not None or places.kafka:
        whole = (
            sqlite_rows(places.sqlite, topic, places.store)
            if places.sqlite is not None
            else kafka_rows(places.kafka, topic, places.store)
        )
        for one in whole:
            if isinstance(one, int):
                begins.append(one)
            else:
                log.append(one)
    if places.store is not None and (places.store / "archive").is_dir():
        for row in archive_rows(places.store, places.run, topic):
            if not begins or row.offset < begins[row.partition]:
                yield row
    yield from log
