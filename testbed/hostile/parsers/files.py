"""Readers of files that a user got from elsewhere: data sets, configurations, metrics."""

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.producers.tasks.dataset_rows import DatasetColumns, SkippedRows, read_rows
from rollstream.run.config.sources import file_layer
from rollstream.storage.metrics_file import read_metrics
from testbed.hostile.damage import changed_bytes, changed_json
from testbed.hostile.parsers.parser import FuzzedParser

COLUMNS = DatasetColumns("prompt", "reference", "answer")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "1+1=", "reference": 2, "answer": "2"},
    {"prompt": [{"role": "user", "content": "a"}], "reference": {"a": [1]}, "answer": "b"},
    {
        "prompt": [
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "reference": None,
        "answer": "é",
    },
)
CONFIGURATION = {"run": "r", "trainer": {"steps": 4, "lr": 1e-5}, "list": [1, {"a": [2]}]}
TOML = b'run = "r"\n[trainer]\nsteps = 4\nlr = 1e-5\nlist = [1, {a = 2}]\n'
CSV = 'prompt,reference,answer\n1+1=,2,"two, or ""2"""\né,3,b\n'.encode()
_arrow: Any = pa


def file_parsers() -> Iterator[FuzzedParser]:
    """Yields the readers of files."""
    yield _file("data set .jsonl", "rows.jsonl", _lines, _read_data_set)
    yield _file("data set .jsonl.gz", "rows.jsonl.gz", _packed_lines, _read_data_set)
    yield _file("data set .json", "rows.json", _list, _read_data_set)
    yield _file("data set .csv", "rows.csv", lambda d: changed_bytes(d, CSV), _read_data_set)
    yield _file("data set .parquet", "rows.parquet", _parquet, _read_data_set)
    yield _file("configuration .toml", "a.toml", lambda d: changed_bytes(d, TOML), file_layer)
    yield _file("configuration .json", "a.json", _configuration, file_layer)
    metrics = b'{"time_s":1.5,"loss":2}\n' * 3
    yield _file("metrics", "m.jsonl", lambda d: changed_bytes(d, metrics), read_metrics)


def _file(
    name: str, file: str, damaged: Callable[[Random], bytes], read: Callable[[Path], object]
) -> FuzzedParser:
    def parse(data: bytes, folder: Path) -> None:
        (folder / file).write_bytes(data)
        read(folder / file)

    return FuzzedParser(name, damaged, parse)


def _read_data_set(path: Path) -> None:
    skipped = SkippedRows(path.name)
    for _ in read_rows([path], COLUMNS, skipped):
        pass
    skipped.check()


def _packed_lines(drawn: Random) -> bytes:
    data = gzip.compress(_lines(drawn))
    return data if drawn.randrange(2) else changed_bytes(drawn, data)


def _list(drawn: Random) -> bytes:
    data = json.dumps([changed_json(drawn, dict(row)) for row in ROWS]).encode()
    return data if drawn.randrange(2) else changed_bytes(drawn, data)


def _lines(drawn: Random) -> bytes:
    rows: list[Any] = [dict(drawn.choice(ROWS)) for _ in range(drawn.randint(1, 3))]
    at = drawn.randrange(len(rows))
    rows[at] = changed_json(drawn, rows[at])
    data = b"\n".join(json.dumps(row).encode() for row in rows)
    return data if drawn.randrange(4) else changed_bytes(drawn, data)


def _configuration(drawn: Random) -> bytes:
    if drawn.randrange(2):
        return json.dumps(changed_json(drawn, CONFIGURATION)).encode()
    return changed_bytes(drawn, json.dumps(CONFIGURATION).encode())


def _table(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(_arrow.table(columns), sink)
    return sink.getvalue()


TEXTS = _table({"prompt": ["a", "b"], "reference": [1, 2], "answer": ["c", "d"]})
CHATS = _table({"prompt": [row["prompt"] for row in ROWS[1:2]], "reference": [1], "answer": ["c"]})
ODD_COLUMNS: tuple[Any, ...] = (
    ["a", None], [b"\xff", b"a"], [1, 2], [1.5, float("nan")], [True, None], [["a"], []],
    [{"role": "user"}, None], [[{"role": "user", "content": None}], []],
    _arrow.array([10**15, -(10**15)], _arrow.timestamp("s")),
    _arrow.array([1, 1 << 60], _arrow.timestamp("ns", tz="Nowhere/Land")),
    _arrow.array([1, 1 << 62], _arrow.duration("s")),
    _arrow.array([None, None], _arrow.null()), _arrow.array([5, 1 << 30], _arrow.date32()),
    _arrow.array([[("a", 1)], None], _arrow.map_(_arrow.string(), _arrow.int8())),
    _arrow.array(["x", "y"]).dictionary_encode(),
)  # fmt: skip


def _parquet(drawn: Random) -> bytes:
    if drawn.randrange(2):
        return changed_bytes(drawn, drawn.choice((TEXTS, CHATS)))
    columns: dict[str, Any] = {"prompt": ["a", "b"], "reference": [1, 2], "answer": ["c", "d"]}
    columns[drawn.choice(list(columns))] = drawn.choice(ODD_COLUMNS)
    return _table(columns)
