"""Answers `map/lag` and `map/length`: how many trajectories have which lag and reward, or which
length and mean reward of their group. Cells count all; a bounded sample of points has names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.errors import ObjectMissing
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import GROUP_REWARDS, LAG, RowFilter, row_filter

BINS = 48
POINTS_MAX = 2000


@dataclass(frozen=True, slots=True)
class MapAxis:
    """An axis: its name as a filter, and its SQL. A `whole` axis has bins of whole numbers."""

    name: str
    sql: str
    whole: bool = False


MAPS: Mapping[str, tuple[MapAxis, MapAxis]] = {
    "lag": (MapAxis("lag", LAG, True), MapAxis("reward", "reward")),
    "length": (
        MapAxis("tokens", "CASE WHEN finish != 'dead' THEN tokens END", True),
        MapAxis("group_reward", "group_reward"),
    ),
}


@dataclass(frozen=True, slots=True)
class MapSelection:
    """The SQL of the selected trajectories with their `x` and `y`."""

    source: str
    parameters: list[Any]


def show_map(run: ExploredRun, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Answers `map/{kind}`; the filters are those of `search`."""
    if kind not in MAPS:
        raise ObjectMissing(f"no map {kind[:40]!r}; maps: {', '.join(MAPS)}")
    x, y = MAPS[kind]
    chosen = _selection(x, y, row_filter(query))
    ends = run.index.row(
        f"SELECT min(x) AS x_min, max(x) AS x_max, min(y) AS y_min, max(y) AS y_max, "
        f"count(*) AS total FROM {chosen.source}", chosen.parameters
    )  # fmt: skip
    assert ends is not None
    x_edges = _edges(ends["x_min"], ends["x_max"], x.whole)
    y_edges = _edges(ends["y_min"], ends["y_max"], y.whole)
    return {
        "kind": kind,
        "x": {"name": x.name, "edges": x_edges},
        "y": {"name": y.name, "edges": y_edges},
        "cells": _cells(run, chosen, x_edges, y_edges) if ends["total"] else [],
        "points": _points(run, chosen, ends["total"]),
        "total": ends["total"],
        "index": run.index.progress.line(),
    }


def _selection(x: MapAxis, y: MapAxis, chosen: RowFilter) -> MapSelection:
    grouped = chosen.needs_groups or "group_reward" in (x.name, y.name)
    joined = f't LEFT JOIN {GROUP_REWARDS} ON of_group = "group"' if grouped else "t"
    source = (
        f"(SELECT {x.sql} AS x, {y.sql} AS y, trajectory, step, p, o FROM {joined} "
        f"WHERE {chosen.condition}) WHERE x IS NOT NULL AND y IS NOT NULL"
    )
    return MapSelection(source, list(chosen.parameters))


def _cells(
    run: ExploredRun, chosen: MapSelection, x_edges: Sequence[float], y_edges: Sequence[float]
) -> list[list[int]]:
    sql = (
        f"SELECT {_bin('x', x_edges)} AS xb, {_bin('y', y_edges)} AS yb, count(*) "
        f"FROM {chosen.source} GROUP BY ALL ORDER BY ALL"
    )
    return [list(cell) for cell in run.index.cursor().execute(sql, chosen.parameters).fetchall()]


def _points(run: ExploredRun, chosen: MapSelection, total: int) -> dict[str, list[Any]]:
    # A hash of the place gives the same sample at every request.
    every = max(1, total // POINTS_MAX)
    return run.index.columns(
        f"SELECT trajectory, x, y, step FROM {chosen.source} AND hash(p, o) % {every} = 0 "
        f"ORDER BY trajectory LIMIT {POINTS_MAX}",
        chosen.parameters,
    )


def _edges(low: float | None, high: float | None, is_whole: bool) -> list[float]:
    if low is None or high is None:
        return []
    if is_whole:
        width = max(1, -(-int(high - low + 1) // BINS))
        count = int(high - low) // width + 1
        return [float(low + width * at) for at in range(count + 1)]
    if high == low:
        return [low - 0.5, low + 0.5]
    bins = BINS // 2
    return [low + (high - low) * at / bins for at in range(bins + 1)]


def _bin(name: str, edges: Sequence[float]) -> str:
    width = edges[1] - edges[0]
    # The last bin has its upper edge.
    last = len(edges) - 2
    return f"least({last}, greatest(0, floor(({name} - {edges[0]!r}) / {width!r})))::INTEGER"
