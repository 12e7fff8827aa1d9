"""Answers `lanes` for a simulated run (`simulated_tile`): the share of each part of the tile that a
rollout decoded, and the version, with pulls and moves.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rollstream.look.explorer.simulated import SimulatedLocation

if TYPE_CHECKING:
    from rollstream.simulator.results import RolloutBars

BINS = 256
ARROWS_MAX = 2000


def simulated_tile(location: SimulatedLocation, z: int, i: int) -> dict[str, Any]:
    """Returns the tile without its steps."""
    width = 2.0**z
    span = (i * width, (i + 1) * width)
    result = location.known
    lanes = ["trainer", *(row.name for row in result.rows)]
    # `finished` of a cell is None: a simulation counts no trajectories by time.
    cells = [[lane, *cell] for lane, row in enumerate(result.rows, 1) for cell in _cells(row, span)]
    return {
        "z": z, "i": i, "from_s": span[0], "to_s": span[1], "lanes": lanes,
        "lanes_total": len(lanes), "detail": "bins", "bins": {"count": BINS, "cells": cells},
        "kills": [], "terms": [], "fences": [], "cut": {}, **_arrows(location, span, lanes),
    }  # fmt: skip


def _cells(row: "RolloutBars", span: tuple[float, float]) -> list[list[Any]]:
    width = (span[1] - span[0]) / BINS
    shares: defaultdict[int, float] = defaultdict(float)
    versions: dict[int, int] = {}
    for start_s, end_s, version in row.bars:
        start, end = max(start_s, span[0]), min(end_s, span[1])
        if start >= end:
            continue
        for at in range(int((start - span[0]) / width), BINS):
            bin_start_s = span[0] + at * width
            if bin_start_s >= end:
                break
            shares[at] += (min(end, bin_start_s + width) - max(start, bin_start_s)) / width
            versions[at] = version
    return [[at, round(min(1.0, shares[at]), 3), versions[at], None] for at in sorted(shares)]


def _arrows(
    location: SimulatedLocation, span: tuple[float, float], lanes: list[str]
) -> dict[str, list[list[Any]]]:
    number = {name: at for at, name in enumerate(lanes)}
    pulls: list[list[Any]] = []
    moves: list[list[Any]] = []
    for arrow in location.known.arrows:
        if not {arrow.source, arrow.target} <= number.keys() or arrow.from_s >= span[1]:
            continue
        if arrow.kind == "move" and arrow.from_s >= span[0]:
            moves.append([arrow.from_s, number[arrow.source], number[arrow.target], None])
        elif arrow.kind == "pull" and span[0] <= arrow.to_s < span[1]:
            pulls.append([number[arrow.source], arrow.to_s, None, None])
    return {"serving": pulls[-ARROWS_MAX:], "moves": moves[-ARROWS_MAX:]}
