"""Answers `lanes`: one tile of time, with what every rollout generated in it, moves, kills, terms
and fences. A tile with few trajectories has them one by one, with their decodes where the log has
the partials; one with many has means per bin.

Tile `i` of level `z` is the time `[i · 2^z, (i + 1) · 2^z)` in seconds since the epoch, so an
answer never depends on how far a living run has come.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.look.explorer.answers.simulated import simulated_tile
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import WrongRequest, whole
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.streams.records import Partial

# Trajectories that a tile has one by one.
ITEMS_MAX = 2000
EVENTS_MAX = 2000  # of each kind
BINS = 256
LANES_MAX = 64
LEVEL_MIN, LEVEL_MAX = -6, 30
# Tiles of at most 16 seconds have decodes.
DECODES_LEVEL = 4
# Trajectories longer than a day may be missing in tiles before their last day: the search for those
# that overlap a tile must end somewhere.
LONGEST_S = 86_400.0


def show_lanes(run: ExploredRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Answers `lanes`. Raises `WrongRequest` for a level or a tile out of range."""
    z, i = whole(query, "z"), whole(query, "i")
    if not LEVEL_MIN <= z <= LEVEL_MAX or abs(i) > 1 << 50:
        raise WrongRequest(f"z must be {LEVEL_MIN} to {LEVEL_MAX}, got {z}; i was {i}")
    width = 2.0**z
    span = (i * width, (i + 1) * width)
    if isinstance(run.location, SimulatedLocation):
        tile = simulated_tile(run.location, z, i)
        return tile | {"steps": _steps(run, span), "index": run.index.progress.line()}
    names, total = _rollouts(run, max(0, whole(query, "rollouts", 0)))
    lanes = ["trainer", *names]
    answer: dict[str, Any] = {
        "z": z, "i": i, "from_s": span[0], "to_s": span[1], "lanes": lanes,
        "lanes_total": total + 1, "cut": {},
    }  # fmt: skip
    overlapping = _overlapping(run, span)
    if overlapping <= ITEMS_MAX:
        answer |= {"detail": "items", "items": _items(run, span, lanes)}
        if z <= DECODES_LEVEL:
            answer["decodes"] = _bounded(answer, "decodes", _decodes(run, span, lanes))
    else:
        answer |= {"detail": "bins", "bins": {"count": BINS, "cells": _bins(run, span, lanes)}}
    answer["steps"] = _bounded(answer, "steps", _steps(run, span))
    answer["serving"] = _bounded(answer, "serving", _serving(run, span, lanes))
    return answer | _events(run, span, lanes, answer) | {"index": run.index.progress.line()}


def _bounded(answer: dict[str, Any], kind: str, rows: Sequence[Any]) -> list[Any]:
    cut = max(0, len(rows) - EVENTS_MAX)
    if cut:
        # The newest rows stay.
        answer["cut"][kind] = cut
    return list(rows[cut:])


def _rollouts(run: ExploredRun, first: int) -> tuple[list[str], int]:
    names = run.index.columns(
        "SELECT DISTINCT rollout FROM (SELECT rollout FROM t UNION ALL SELECT rollout FROM served)"
    )["rollout"]
    ordered = sorted(names, key=_natural)
    return ordered[first : first + LANES_MAX], len(ordered)


def _natural(name: str) -> tuple[Any, ...]:
    head = name.rstrip("0123456789")
    # `rollout-9` is before `rollout-10`.
    digits = name[len(head) :]
    return (head, int(digits) if digits else -1, name)


_WITHIN = "started_s < ? AND finished_s >= ? AND started_s >= ?"


def _within(span: tuple[float, float]) -> list[float]:
    return [span[1], span[0], span[0] - LONGEST_S]


def is_crowded(run: ExploredRun, z: int, i: int) -> bool:
    """Whether a tile has too many trajectories to show them one by one."""
    width = 2.0**z
    return _overlapping(run, (i * width, (i + 1) * width)) > ITEMS_MAX


def _overlapping(run: ExploredRun, span: tuple[float, float]) -> int:
    return run.index.value(f"SELECT count(*) FROM t WHERE {_WITHIN}", _within(span))


def _items(run: ExploredRun, span: tuple[float, float], lanes: Sequence[str]) -> list[list[Any]]:
    rows = run.index.rows(
        "SELECT rollout, started_s, finished_s, version, version_last, trajectory, finish, "
        f"attempt, tokens, step, moves FROM t WHERE {_WITHIN} ORDER BY started_s LIMIT {ITEMS_MAX}",
        _within(span),
    )
    number = {name: at for at, name in enumerate(lanes)}
    return [
        [number[row["rollout"]], *list(row.values())[1:]]
        for row in rows
        if row["rollout"] in number
    ]


def _bins(run: ExploredRun, span: tuple[float, float], lanes: Sequence[str]) -> list[list[Any]]:
    """Returns for each lane and bin the mean number of running trajectories, the newest version
    that finished there and how many did.
    """
    width = (span[1] - span[0]) / BINS
    rows = (
        run.index.cursor()
        .execute(
            f"""
        WITH hit AS (
            SELECT rollout, version_last AS version, greatest(started_s, $a) AS s,
                least(finished_s, $b) AS e, finished_s < $b AS ends
            FROM t WHERE started_s < $b AND finished_s >= $a AND started_s >= $early
        ), edges AS (
            SELECT rollout, least({BINS - 1}, floor((s - $a) / $w))::INTEGER AS bin,
                1 AS delta, 1 - (s - $a) / $w % 1 AS part, NULL AS version, 0 AS ended FROM hit
            UNION ALL
            SELECT rollout, least({BINS - 1}, floor((e - $a) / $w))::INTEGER,
                -1, (e - $a) / $w % 1 - 1, version, ends::INTEGER FROM hit
        ), sums AS (
            SELECT rollout, bin, sum(delta) AS delta, sum(part) AS part, max(version) AS version,
                sum(ended) AS ended FROM edges GROUP BY ALL
        )
        SELECT rollout, bin, part, delta, version, ended FROM sums ORDER BY rollout, bin
        """,
            {"a": span[0], "b": span[1], "early": span[0] - LONGEST_S, "w": width},
        )
        .fetchall()
    )
    return _cells(rows, lanes)


def _cells(rows: Sequence[tuple[Any, ...]], lanes: Sequence[str]) -> list[list[Any]]:
    number = {name: at for at, name in enumerate(lanes)}
    cells: list[list[Any]] = []
    lane, running, at, version = "", 0, 0, None
    for rollout, bin, part, delta, newest, ended in rows:
        if rollout not in number:
            continue
        if rollout != lane:
            lane, running, at, version = rollout, 0, bin, None
        # Between two changes of a lane the number of running ones is constant: such bins are filled
        # in.
        while running and at < bin:
            cells.append([number[lane], at, running, version, 0])
            at += 1
        version = newest if newest is not None else version
        cells.append([number[lane], bin, round(running + part, 3), version, int(ended)])
        running, at = running + int(delta), bin + 1
    return cells


def _steps(run: ExploredRun, span: tuple[float, float]) -> list[list[Any]]:
    rows = run.index.rows(
        "SELECT time_s - coalesce(metrics['seconds'], 0) AS start_s, time_s, step, version "
        "FROM steps WHERE time_s >= ? AND time_s - coalesce(metrics['seconds'], 0) < ? "
        "ORDER BY time_s", [span[0], span[1]]
    )  # fmt: skip
    return [list(row.values()) for row in rows]


def _serving(run: ExploredRun, span: tuple[float, float], lanes: Sequence[str]) -> list[list[Any]]:
    number = {name: at for at, name in enumerate(lanes)}
    rows = run.index.rows(
        "SELECT rollout, time_s, version, rollout_term FROM served "
        "WHERE time_s >= ? AND time_s < ? ORDER BY time_s", [span[0], span[1]]
    )  # fmt: skip
    return [
        [number[row["rollout"]], *list(row.values())[1:]]
        for row in rows
        if row["rollout"] in number
    ]


def _events(
    run: ExploredRun, span: tuple[float, float], lanes: Sequence[str], answer: dict[str, Any]
) -> dict[str, Any]:
    number = {name: at for at, name in enumerate(lanes)}
    state = run.state
    moves = [
        [m.time_s, number[m.source], number[m.destination], m.requests]
        for m in (state.moves if state else ())
        if span[0] <= m.time_s < span[1] and {m.source, m.destination} <= number.keys()
    ]
    events = run.supervised()
    kills = [
        [float(line["time_s"]), str(line.get("role", "")), line.get("code")]
        for line in events
        if line.get("event") == "death" and span[0] <= float(line["time_s"]) < span[1]
    ]
    terms = run.index.rows(
        "SELECT min(time_s) AS time_s, rollout AS role, rollout_term AS term FROM served "
        "GROUP BY ALL HAVING min(time_s) >= ? AND min(time_s) < ? ORDER BY ALL", [span[0], span[1]]
    )  # fmt: skip
    fences = run.index.rows(
        "SELECT time_s, role, term, topic FROM opened WHERE time_s >= ? AND time_s < ? "
        "ORDER BY ALL", [span[0], span[1]]
    )  # fmt: skip
    marks = {
        "moves": moves,
        "kills": kills,
        "terms": [list(row.values()) for row in terms],
        "fences": [list(row.values()) for row in fences],
    }
    return {kind: _bounded(answer, kind, rows) for kind, rows in marks.items()}


def _decodes(run: ExploredRun, span: tuple[float, float], lanes: Sequence[str]) -> list[list[Any]]:
    number = {name: at for at, name in enumerate(lanes)}
    partials, _ = run.records.scan("partials", span[0] - 4.0, span[1] + 4.0)
    before: dict[str, float] = {}
    decodes: list[list[Any]] = []
    for message in sorted(partials, key=lambda message: message.time_s):
        record = message.record
        if not isinstance(record, Partial) or record.rollout not in number:
            continue
        # A part begins at the partial before it.
        start_s = before.get(record.trajectory, message.time_s - 2.0)
        before[record.trajectory] = message.time_s
        if message.time_s >= span[0] and start_s < span[1]:
            version = record.spans[-1].version.number if record.spans else None
            end = record.start + len(record.tokens)
            decodes.append(
                [number[record.rollout], record.trajectory, start_s, message.time_s, record.start,
                 end, version]
            )  # fmt: skip
    return decodes
