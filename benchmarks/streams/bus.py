"""The SQLite bus and the codec against raw SQLite moving the same bytes, already encoded.

Both sides make the same transactions of 64 records on the same SQLite settings and table, one
writer, one reader; a batch of one and of the other take turns, so that both meet the same
machine. The bus encodes on the clock, checks its settings and hands out offsets; its reader
verifies checksums, decodes and reads every field. Writes are timed by the wall clock; reads, which
wait for nothing, by the thread's, so that other processes do not count. Beside them, without a
goal: a JSON-lines file with a flush per record, the default of several frameworks.

`bus_read` misses its mark. Per record of 4.9 KB, CPU time: raw SQLite takes 1.7 µs, of which 1 µs
is copying from the page cache, so 0.5 allows 3.4 µs. The bus and the codec take 5.3: rows fetched
1.2, records cut out of them and positions checked 0.9; checksum and header found 0.5, header parsed
0.6, three arrays made 1.4, fields read 0.4, the rest between them. Measured and not kept, because
together they would end at about 0.4: a poll's headers parsed as one list (0.4 less), values as
views of their row (0.1 less), array views cut from one view of a row (0.4 less), larger rows and
SQLite's incremental reads of blobs (nothing), the header checked without a call of its own (0.2
less). Arrays made by `ndarray` take 0.1 more, as fields of one structured view 0.2 more, rows of 15
KB, which need no overflow pages, 1 more.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.case import Case, alone, paired
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import decode, encode
from rollstream.streams.records import Trajectory
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.database import Database
from rollstream.streams.topics import Topic
from rollstream.streams.values import Span, Version

BATCH = 64  # records of one append and of one read
STREAM_BYTES = 150e6  # of one pair: over twice the size at which SQLite writes a checkpoint
PROMPT_TOKENS = 32
RAW = "raw SQLite"
TABLE = (
    "CREATE TABLE log (offset INTEGER PRIMARY KEY, timestamp_ms INTEGER NOT NULL, "
    "key BLOB NOT NULL, value BLOB)"
)

fields_of = attrgetter(*Trajectory.__struct_fields__)


def cases(quick: bool) -> Iterator[Case]:
    """Writing and reading, at 512 and at 8 192 tokens."""
    pairs = 3 if quick else 11
    yield from _at_length(512, "", pairs, 3200, (0.6, 0.5))
    yield from _at_length(8192, "_8k", pairs, 256, (0.8, 0.7))


def _at_length(
    tokens: int, suffix: str, pairs: int, count: int, goals: tuple[float, float]
) -> Iterator[Case]:
    records = [trajectory_of(tokens, seed) for seed in range(count)]
    encoded = [encode(record) for record in records]
    mean_bytes = sum(map(len, encoded)) / count
    total = int(STREAM_BYTES / mean_bytes) // BATCH * BATCH
    _pair(records, encoded, total)  # warms caches
    measured = [_pair(records, encoded, total) for _ in range(pairs)]
    lines = _json_lines([_plain(record) for record in records])
    for index, what in enumerate(("write", "read")):
        bus, raw = ([total / pair[index][side] for pair in measured] for side in (0, 1))
        megabytes = statistics.median(bus) * mean_bytes / 1e6
        note = f"{megabytes:,.0f} MB/s, {mean_bytes:,.0f} bytes a record, {BATCH} a transaction"
        yield paired(f"bus_{what}{suffix}", bus, "records/s", RAW, raw, goals[index], note)
        note = f"{lines[2] / lines[index] / 1e6:,.0f} MB/s, {lines[2] / count:,.0f} bytes a line"
        yield alone(f"bus_jsonl_{what}{suffix}", count / lines[index], "records/s", note=note)


def _pair(
    records: Sequence[Trajectory], encoded: Sequence[bytes], total: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of bus and raw SQLite to write `total` records, and to read them by other
    connections.
    """
    folder = Path(tempfile.mkdtemp())
    sides: list[_BusSide | _RawSide] = [_BusSide(folder, records), _RawSide(folder, encoded)]
    written = _in_turn([side.write for side in sides], total, time.perf_counter)
    read = _in_turn([side.read for side in sides], total, time.thread_time)
    for side in sides:
        side.close()
    shutil.rmtree(folder)
    return written, read


def _in_turn(
    steps: Sequence[Callable[[int], None]], count: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of two steps that take turns, batch by batch, so that both run under the same
    load.
    """
    seconds = [0.0, 0.0]
    for at in range(0, count, BATCH):
        for index in (0, 1) if at // BATCH % 2 else (1, 0):
            started = clock()
            steps[index](at)
            seconds[index] += clock() - started
    return seconds[0], seconds[1]


class _BusSide:
    """Encodes and appends, reads and decodes; the reader has its own connection."""

    def __init__(self, folder: Path, records: Sequence[Trajectory]) -> None:
        self._records = records
        self._writer = SqliteBus(folder)
        self._writer.create([Topic("trajectories")])
        self._reader = SqliteBus(folder)

    def write(self, at: int) -> None:
        batch = self._records[at % len(self._records) :][:BATCH]
        self._writer.append(
            "trajectories", [AppendEntry(b"%d" % r.group, encode(r)) for r in batch]
        )

    def read(self, at: int) -> None:
        for message in self._reader.read("trajectories", {0: at}, records_max=BATCH):
            fields_of(decode(message.value or b"").record)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class _RawSide:
    """The same bytes without the bus: the settings of its files, its table, its transactions."""

    def __init__(self, folder: Path, encoded: Sequence[bytes]) -> None:
        self._encoded = encoded
        self._writer, self._reader = (Database(folder / "raw.db", "normal") for _ in range(2))
        with self._writer.writing("create") as connection:
            connection.execute(TABLE)
        with self._writer.reading("use") as writer, self._reader.reading("use") as reader:
            self._write, self._read = writer, reader

    def write(self, at: int) -> None:
        rows = [
            (offset, 1_763_700_000_000, b"%d" % offset, value)
            for offset, value in enumerate(self._encoded[at % len(self._encoded) :][:BATCH], at)
        ]
        self._write.execute("BEGIN IMMEDIATE")
        self._write.executemany("INSERT INTO log VALUES (?, ?, ?, ?)", rows)
        self._write.execute("COMMIT")

    def read(self, at: int) -> None:
        self._read.execute(
            "SELECT offset, timestamp_ms, key, value FROM log WHERE offset >= ? "
            "ORDER BY offset LIMIT ?",
            (at, BATCH),
        ).fetchall()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def trajectory_of(tokens: int, seed: int) -> Trajectory:
    """A finished trajectory of so many tokens, drawn from the seed."""
    random = np.random.default_rng(seed)
    generated = tokens - PROMPT_TOKENS
    sources = np.repeat(np.array([0, 1], np.uint8), [PROMPT_TOKENS, generated])
    version = Version(41, 1)
    return Trajectory(
        trajectory=f"g{seed:08d}.03",
        group=seed,
        index=3,
        attempt=1,
        task="remainder",
        rollout="rollout-0",
        rollout_term=4,
        tokens=random.integers(0, 150_000, tokens, dtype=np.uint32),
        sources=sources,
        logprobs=-random.random(generated, dtype=np.float32),
        spans=(Span(0, generated, version),),
        finish="stop",
        reward=1.0,
        trainer_version=Version(43, 1),
        started_s=1_763_700_000.125 + seed,
        finished_s=1_763_700_003.75 + seed,
        wave=3,
    )


def _plain(record: Trajectory) -> dict[str, object]:
    """A record in the form of a JSON-lines framework: lists and numbers."""
    return msgspec.to_builtins(record, enc_hook=np.ndarray.tolist)


def _json_lines(records: Sequence[dict[str, object]]) -> tuple[float, float, int]:
    """Seconds to write and to read, and bytes."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "trajectories.jsonl"
    started = time.perf_counter()
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.flush()
    written = time.perf_counter() - started
    started = time.perf_counter()
    with path.open() as file:
        for line in file:
            json.loads(line)
    read = time.perf_counter() - started
    size = path.stat().st_size
    shutil.rmtree(folder)
    return written, read, size
