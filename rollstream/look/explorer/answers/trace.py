"""Writes a run as a trace for Perfetto's page (ui.perfetto.dev), in Chrome's JSON trace events,
compressed by gzip: a track per rollout, one for the trainer's steps, and marks for versions, moves,
deaths and terms. Times are microseconds since the run's first event.
"""

import gzip
import heapq
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.answers.overview import span_of
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.looking import metrics_folder
from rollstream.storage.metrics_file import read_metrics
from rollstream.whole_file import output_file

READY_S = 3600.0
ROWS = 4096  # rows that are fetched together
TRAINER = 1  # process numbers; rollouts follow
# Rows: the trainer's only one, and a rollout's one of moves, before the others.
STEPS = MOVES = 1
# Most rows of a process. Thread numbers are unique in the trace and are no process numbers: for
# Perfetto 0 is the machine's idle thread, and a thread with its process's number its main thread.
THREADS = 100_000


def write_trace(location: RunLocation, path: Path, is_typed: bool = False) -> int:
    """Write the trace of a run (`output_file`); returns the number of its events. Raises
    `ConfigurationError` for a run without any.
    """
    with ExploredRun(0, location, lambda event, data: None, time.time) as run:
        until_s = time.monotonic() + READY_S
        while not run.index.progress.complete:
            if run.trouble or time.monotonic() > until_s:
                raise ConfigurationError(f"{location.name} cannot be read: {run.trouble}")
            run.watch()
            time.sleep(0.02)
        if span_of(run) is None:
            raise ConfigurationError(f"{location.name} holds no trajectory and no step to trace")
        return _write(path, is_typed, trace_events(run))


def trace_events(run: ExploredRun) -> Iterator[dict[str, Any]]:
    """Yields the names of the tracks, then the events of a run, with times since the first."""
    zero_s = run.index.value(
        "SELECT least((SELECT min(started_s) FROM t), (SELECT min(time_s) FROM opened), "
        "(SELECT min(time_s) FROM served), (SELECT min(time_s - coalesce(metrics['seconds'], 0)) "
        "FROM steps))"
    )

    def at(time_s: float) -> int:
        return round((time_s - zero_s) * 1e6)

    names = run.index.columns("SELECT DISTINCT rollout FROM t ORDER BY rollout")["rollout"]
    numbers = {name: number for number, name in enumerate(names, TRAINER + 1)}
    yield from _process(TRAINER, "trainer")
    yield _thread(TRAINER, STEPS, "steps")
    for name, number in numbers.items():
        yield from _process(number, name)
        yield _thread(number, MOVES, "moves")
    yield from _steps(run, at)
    for name, number in numbers.items():
        yield from _trajectories(run, name, number, at)
    yield from _marks(run, numbers, at)


def _process(number: int, name: str) -> Iterator[dict[str, Any]]:
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": number})):
        yield {"ph": "M", "name": f"process_{what}", **_track(number, 1), "args": args}


def _thread(number: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", **_track(number, row), "args": {"name": name}}


def _track(number: int, row: int) -> dict[str, int]:
    return {"pid": number, "tid": THREADS * number + row}


def _steps(run: ExploredRun, at: Callable[[float], int]) -> Iterator[dict[str, Any]]:
    rows = run.index.rows(
        "SELECT step, term, time_s, version, coalesce(metrics['seconds'], 0) AS seconds, "
        "metrics['reward_mean'] AS reward_mean, metrics['loss'] AS loss FROM steps ORDER BY step"
    )
    for row in rows:
        start = at(row["time_s"] - row["seconds"])
        yield {
            "ph": "X", "cat": "step", "name": f"step {row['step']}", **_track(TRAINER, STEPS),
            "ts": start, "dur": at(row["time_s"]) - start,
            "args": {name: row[name] for name in ("term", "version", "reward_mean", "loss")},
        }  # fmt: skip


def _trajectories(
    run: ExploredRun, rollout: str, number: int, at: Callable[[float], int]
) -> Iterator[dict[str, Any]]:
    # Trajectories of one rollout overlap, so each gets the lowest row that is free when it starts.
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rows = MOVES
    for row in _in_order(run, rollout):
        while busy and busy[0][0] <= row["started_s"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            place = heapq.heappop(free)
        else:
            rows, place = rows + 1, rows + 1
            yield _thread(number, place, f"row {place - MOVES}")
        heapq.heappush(busy, (row["finished_s"], place))
        start = at(row["started_s"])
        yield {
            "ph": "X", "cat": row["task"], "name": row["trajectory"], **_track(number, place),
            "ts": start, "dur": max(0, at(row["finished_s"]) - start),
            "args": {key: row[key] for key in ("group", "finish", "reward", "tokens", "version",
                                               "version_last", "step", "moves", "attempt")},
        }  # fmt: skip


def _in_order(run: ExploredRun, rollout: str) -> Iterator[dict[str, Any]]:
    # Pages of `ROWS` bound the memory.
    after: tuple[float, str] = (-1e300, "")
    while True:
        rows = run.index.rows(
            'SELECT trajectory, "group", task, finish, reward, tokens, version, version_last, '
            "step, moves, attempt, started_s, finished_s FROM t "
            "WHERE rollout = ? AND (started_s, trajectory) > (?, ?) "
            f"ORDER BY started_s, trajectory LIMIT {ROWS}",
            [rollout, *after],
        )
        yield from rows
        if len(rows) < ROWS:
            return
        after = (rows[-1]["started_s"], rows[-1]["trajectory"])


def _marks(
    run: ExploredRun, numbers: dict[str, int], at: Callable[[float], int]
) -> Iterator[dict[str, Any]]:
    def mark(name: str, number: int, time_s: float, args: dict[str, Any]) -> dict[str, Any]:
        scope = "p" if number else "g"
        return {"ph": "i", "cat": "mark", "name": name, **_track(number or TRAINER, 1),
                "ts": at(time_s), "s": scope, "args": args}  # fmt: skip

    for row in run.index.rows("SELECT * FROM served ORDER BY time_s"):
        if row["rollout"] in numbers:
            args = {"seconds": row["seconds"], "term": row["rollout_term"]}
            yield mark(f"version {row['version']}", numbers[row["rollout"]], row["time_s"], args)
    for row in run.index.rows("SELECT * FROM opened ORDER BY time_s"):
        args = {"term": row["term"], "topic": row["topic"]}
        yield mark(f"{row['role']} opens term {row['term']}", 0, row["time_s"], args)
    for line in _lines(run, "supervisor.jsonl"):
        if line.get("event") == "death":
            name = f"{line.get('role')} died"
            yield mark(name, 0, line["time_s"], {"code": line.get("code")})
    for number, line in enumerate(_lines(run, "moves.jsonl")):
        ends = (numbers.get(str(line.get("source"))), numbers.get(str(line.get("destination"))))
        if ends[0] and ends[1]:
            yield from _move(number, ends[0], ends[1], at(line["time_s"]), line.get("requests"))


def _move(
    number: int, source: int, destination: int, ts: int, requests: object
) -> Iterator[dict[str, Any]]:
    for phase, pid in (("s", source), ("f", destination)):
        # Perfetto draws an arrow only between two slices, so both ends are short ones.
        place = {"cat": "move", "name": "move", **_track(pid, MOVES), "ts": ts}
        yield place | {"ph": "X", "dur": 1, "args": {"requests": requests}}
        yield place | {"ph": phase, "id": number} | ({"bp": "e"} if phase == "f" else {})


def _lines(run: ExploredRun, name: str) -> list[dict[str, Any]]:
    path = metrics_folder(run.location) / name
    lines = read_metrics(path) if path.is_file() else []
    return [line for line in lines if isinstance(line.get("time_s"), int | float)]


def _write(path: Path, is_typed: bool, events: Iterator[dict[str, Any]]) -> int:
    count = 0
    with (
        output_file(path, is_typed) as partial,
        gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as file,
    ):
        # Without `displayTimeUnit`: releases of Perfetto took it for the unit of the times.
        file.write('{"traceEvents":[')
        for count, event in enumerate(events, 1):
            file.write(("," if count > 1 else "") + "\n" + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")
    return count
