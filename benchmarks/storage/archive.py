"""The archive: its writer against pyarrow alone, against the log that it follows, and its cost to a
run.

`archive_write` starts with messages as the bus returns them and ends with a file created in a
store; pyarrow alone gets the finished table and writes it with the same options to a file of the
same folder. `archive_stream` reads a log of 8 192-token trajectories and writes it as files, on one
core; it is compared with the bus's own writer of the same records. `archive_cost` is the share of
trained tokens per second that the quickstart loses with its archive on.

Measured for the encodings (µs of CPU per record of 74 KB, 8 192 tokens drawn from 150 000): arrays
with dictionaries 760, without 330; without statistics of single tokens 40 less; log-probabilities
not compressed 30 less, for files 7 % larger. BYTE_STREAM_SPLIT for them costs nothing and saves 5
%, but Spark before 2026 does not read it.

Row groups of 16 MiB in place of 64 take a fifth off the archive's time where memory is slow.

`archive_stream` misses its goal. Per record the bus's writer takes 130 µs of CPU; the archive 260:
reading from SQLite 56, judging 13, the table 15, Parquet 160, creating the file 14. Pyarrow alone
is above the bus's writer already: each of the three columns with a value per token costs it 40
before any compression, 28 of them for the levels of its list; zstd for the tokens adds 32 and takes
a third off them. A second thread would hide half of it and take a second core. The ratio was .76 on
21 November and .37 to .53 two days later, without a change of the code: side by side on one loaded
machine the archive of both days takes 500 to 530 µs of CPU per record, and the bus 119 to 125. By
the wall clock .76 contains the bus's waiting for the disk.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.case import Case, alone, paired
from benchmarks.runs.measured import run
from benchmarks.runs.quickstart import ASYNC, QUICKSTART, warm_model
from benchmarks.streams.bus import BATCH, trajectory_of
from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.archive.files import encode_file, incompressible_columns, write_options
from rollstream.storage.archive.tables import table_of
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import AppendEntry, Message
from rollstream.streams.codec import encode
from rollstream.streams.records import Fence, Trajectory
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import Topic

TOKENS = 8192
FILE_RECORDS = 1024  # 76 MB in the log
STREAM_RECORDS = 2048
PAIRS, PAIRS_QUICK = 7, 3
RUNS, RUNS_QUICK = 5, 1
COST_MAX = 0.03
TOPIC = "trajectories"


def cases(quick: bool) -> Iterator[Case]:
    """Yields writing, keeping up with the log, and the cost to a run."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    records = [trajectory_of(TOKENS, seed) for seed in range(256)]
    pairs = PAIRS_QUICK if quick else PAIRS
    yield _write(records, pairs)
    yield _stream(records, pairs)
    yield _cost(RUNS_QUICK if quick else RUNS)


def _write(records: Sequence[Trajectory], pairs: int) -> Case:
    values = [encode(record) for record in records]
    messages = [
        Message(TOPIC, 0, at, 1_763_700_000_000 + at, b"%d" % at, values[at % len(values)])
        for at in range(FILE_RECORDS)
    ]
    table = table_of(TOPIC, messages)
    options = write_options(TOPIC, incompressible_columns(TOPIC, table))
    seconds: list[tuple[float, ...]] = []
    size = 0
    with tempfile.TemporaryDirectory(prefix="rollstream-archive-") as folder:
        store = open_store(f"file:{folder}")

        def ours() -> None:
            store.create("archive/ours.parquet", encode_file(TOPIC, messages, Fence()).data)

        def theirs() -> None:
            pq.write_table(table, f"{folder}/theirs.parquet", **options)

        for pair in range(pairs + 1):
            seconds.append(_in_turn([ours, theirs], pair))
            size = store.stat("archive/ours.parquet").bytes
            store.delete("archive/ours.parquet")
    ours_s, theirs_s = ([FILE_RECORDS / pair[side] for pair in seconds[1:]] for side in (0, 1))
    raw = sum(map(len, values)) / len(values)
    speed, share = statistics.median(ours_s) * raw / 1e6, size / FILE_RECORDS / raw
    note = f"{speed:,.0f} MB/s of the log, files of {share:.2f} of its bytes"
    return paired("archive_write", ours_s, "records/s", "pyarrow alone", theirs_s, 0.5, note)


def _stream(records: Sequence[Trajectory], pairs: int) -> Case:
    seconds = [_follow(records) for _ in range(pairs + 1)][1:]
    ours, bus = ([STREAM_RECORDS / pair[side] for pair in seconds] for side in (0, 1))
    note = f"{TOKENS} tokens a record, read from the log and written as files by one thread"
    return paired("archive_stream", ours, "records/s", "the bus's writer", bus, 1.0, note)


def _follow(records: Sequence[Trajectory]) -> tuple[float, float]:
    """Seconds of the archive for a log of `STREAM_RECORDS`, and of the bus to write that log."""
    folder = Path(tempfile.mkdtemp(prefix="rollstream-archive-"))
    writer = SqliteBus(folder / "bus")
    writer.create([Topic(TOPIC)])
    reader, store = SqliteBus(folder / "bus"), open_store(f"file:{folder / 'store'}")
    archive = TopicArchive(reader, store, "bench", TOPIC, ArchiveSettings(roll_bytes=64 << 20))
    archive.start()
    ours = bus = 0.0
    for at in range(0, STREAM_RECORDS, BATCH):
        batch = [records[(at + index) % len(records)] for index in range(BATCH)]
        started = time.perf_counter()
        writer.append(TOPIC, [AppendEntry(b"%d" % r.group, encode(r)) for r in batch])
        between = time.perf_counter()
        while archive.advance():
            pass
        ours += time.perf_counter() - between
        bus += between - started
    started = time.perf_counter()
    archive.finish()
    ours += time.perf_counter() - started
    reader.close()
    writer.close()
    shutil.rmtree(folder)
    return ours, bus


def _cost(pairs: int) -> Case:
    """Runs with and without archive, one after the other from the same warm model."""
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rollstream-archive-") as scratch:
        base = Path(scratch)
        warm = warm_model(base)
        for pair in range(pairs):
            speeds: dict[str, float] = {}
            for wanted in ("true", "false") if pair % 2 else ("false", "true"):
                given = [f"model.path={warm}", f"seed={pair}", f"archive.enabled={wanted}"]
                folder = base / f"{wanted}-{pair}"
                speeds[wanted] = run(QUICKSTART, folder, [*given, *ASYNC]).tokens_per_s
            shares.append(1 - speeds["true"] / speeds["false"])
    value = statistics.median(shares)
    note = f"of trained tokens/s; {min(shares):.3f} to {max(shares):.3f} in {len(shares)} pairs"
    return alone("archive_cost", value, "share", at_most=COST_MAX, note=note)


def _in_turn(steps: Sequence[Callable[[], None]], turn: int) -> tuple[float, ...]:
    """Seconds of each step; the order alternates from turn to turn."""
    seconds = [0.0] * len(steps)
    for index in range(len(steps)) if turn % 2 else reversed(range(len(steps))):
        started = time.perf_counter()
        steps[index]()
        seconds[index] = time.perf_counter() - started
    return tuple(seconds)
