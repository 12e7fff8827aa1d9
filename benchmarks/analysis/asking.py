"""Queries over the log: `rollstream query` against hand-written DuckDB on the same files, and the
cost of starting.

`query_overhead` asks a million generated archived trajectories for counts, groups and quantiles, in
turns through the views of an open session and by `read_parquet` on a glob; each side binds its
query again every time. `query_startup` and `cli_help_s` time processes from start to end; the
reference of `query_startup` is a Python process that only imports DuckDB.

Of CPU time a query adds to that import: 26 ms to open and close a connection, which no setting of
DuckDB shortens (one thread: nothing), and 25 ms for 30 modules of its own. Collecting garbage only
after they are imported takes 7 ms off. Freezing them (`gc.freeze`) would take off more and is not
used: DuckDB's binding reports leaks at the exit then.
"""

import dataclasses
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.case import Case, alone, paired
from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.archive.tables import table_of
from rollstream.streams.bus import Message
from rollstream.streams.codec import encode
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Span, Version

ROWS, QUICK_ROWS = 1_000_000, 100_000
FILE_ROWS = 50_000
TOKENS = 24
STARTED_MS = 1_763_700_000_000
QUESTIONS = {
    "counts": 'SELECT count(*), count(*) FILTER (reward > 0.5), count(DISTINCT "group") FROM {t}',
    "groups": "SELECT task, rollout, finish, count(*), avg(reward), max(finished_s - started_s) "
    "FROM {t} GROUP BY ALL ORDER BY ALL",
    "quantiles": "SELECT rollout, quantile_cont(finished_s - started_s, [0.5, 0.9, 0.99]), "
    "quantile_cont(len(logprobs), 0.5) FROM {t} GROUP BY ALL ORDER BY ALL",
}


def cases(quick: bool) -> Iterator[Case]:
    """Yields the three queries, then the two start times."""
    folder = Path(tempfile.mkdtemp())
    try:
        rows = QUICK_ROWS if quick else ROWS
        _archive(folder, rows)
        yield _overhead(folder, rows, 3 if quick else 9)
        yield from _starts(folder, 5 if quick else 15)
    finally:
        shutil.rmtree(folder)


def _overhead(folder: Path, rows: int, pairs: int) -> Case:
    """All queries together: time through views over time by hand; above 1 the views are slower."""
    files = f"{folder}/archive/topic=trajectories/**/*.parquet"
    by_hand = f"read_parquet('{files}', hive_partitioning = true)"
    connection = duckdb.connect()
    with QuerySession(locate_run(str(folder)), _fail) as session:

        def views(question: str) -> list[tuple[object, ...]]:
            answer = session.answer(question.format(t="trajectories"))
            return [row for batch in answer.batches for row in batch]

        def hand(question: str) -> list[tuple[object, ...]]:
            return connection.execute(question.format(t=by_hand)).fetchall()

        for question in QUESTIONS.values():  # warms caches; both sides must return the same rows
            assert views(question) == hand(question), question
        ours, theirs = _in_turn(views, hand, pairs)
    note = f"{', '.join(QUESTIONS)} over {rows:,} trajectories"
    return _at_most("query_overhead", ours, "s", "DuckDB by hand", theirs, 1.3, note)


def _in_turn(
    one: Callable[[str], object], other: Callable[[str], object], pairs: int
) -> tuple[list[float], list[float]]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        sides = [(0, one), (1, other)]
        for index, ask in sides if number % 2 else sides[::-1]:
            started = time.perf_counter()
            for question in QUESTIONS.values():
                ask(question)
            seconds[index].append(time.perf_counter() - started)
    return seconds


def _starts(folder: Path, times: int) -> Iterator[Case]:
    program = [sys.executable, "-m", "rollstream"]
    query = [*program, "query", "SELECT 42", "--run", str(folder)]
    ours: list[float] = []
    theirs: list[float] = []
    helps: list[float] = []
    for _ in range(times):
        ours.append(_seconds(query))
        theirs.append(_seconds([sys.executable, "-c", "import duckdb"]))
        helps.append(_seconds([*program, "--help"]))
    yield _at_most("query_startup", ours, "s", "import duckdb", theirs, 1.5, "whole processes")
    yield alone("cli_help_s", statistics.median(helps), "s", at_most=0.3)


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _at_most(
    case: str, values: Sequence[float], unit: str, reference: str, base: Sequence[float],
    goal: float, note: str,
) -> Case:  # fmt: skip
    """Returns pairs of times; smaller is better."""
    measured = paired(case, values, unit, reference, base, note=note)
    assert measured.ratio is not None
    return dataclasses.replace(measured, goal=goal, met=measured.ratio <= goal)


def _archive(folder: Path, rows: int) -> None:
    """Writes archive files with the archive role's names and encoding. One table is built from
    records; the others are copies of it with their own names, groups and offsets.
    """
    base = table_of("trajectories", [_message(number) for number in range(FILE_ROWS)])
    for first in range(0, rows, FILE_ROWS):
        numbers = np.arange(first, first + FILE_ROWS)
        table = _replaced(base, "offset", pa.array(numbers))
        table = _replaced(table, "group", pa.array(numbers // 8))
        table = _replaced(table, "trajectory", pa.array([f"{n // 8}.{n % 8}" for n in numbers]))
        path = folder / archive_key("trajectories", "generated", 0, first, STARTED_MS)
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
            writer.write_table(table)
            last = str(first + FILE_ROWS - 1)
            metadata = {"first": str(first), "last": last, "fence": "0:0", "schema": "1"}
            writer.add_key_value_metadata({f"rollstream.{k}": v for k, v in metadata.items()})


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), values)


def _message(number: int) -> Message:
    random = np.random.default_rng(number)
    length = 8 + int(random.exponential(TOKENS))
    record = Trajectory(
        trajectory=str(number),
        group=number,
        index=number % 8,
        attempt=1,
        task=("remainder", "countdown", "chess")[number // 8 % 3],
        rollout=f"rollout-{number % 16}",
        rollout_term=1,
        tokens=random.integers(0, 150_000, length + 8, dtype=np.uint32),
        sources=np.repeat(np.array([0, 1], np.uint8), [8, length]),
        logprobs=-random.random(length, dtype=np.float32),
        spans=(Span(0, length, Version(number // 4096, 1)),),
        finish="stop" if number % 10 else "length",
        reward=float(random.random() < 0.6),
        trainer_version=Version(number // 4096, 1),
        started_s=STARTED_MS / 1000 + number / 50,
        finished_s=STARTED_MS / 1000 + number / 50 + float(random.exponential(3)),
    )
    return Message(
        "trajectories", 0, number, STARTED_MS + number * 20, b"%d" % number, encode(record)
    )


def _fail(text: str) -> None:
    raise AssertionError(text)
