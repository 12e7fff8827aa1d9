"""Simulates the published figures under joint draws of what the papers leave open (`draws.py`), and
prints where each figure holds: `python -m studies.sweep DRAWS.jsonl [--draws 40]`.

The file has a line per draw; a repeated command adds those that are missing. `--svg FILE` draws the
figures over their published values.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.histospec.plot import picture
from rollstream.errors import ConfigurationError
from rollstream.look.report.chart import Chart, Series
from studies.draws import (
    CHOICES,
    FAMILIES,
    OPEN_RANGES,
    TARGETS,
    Draw,
    Figures,
    draw,
)

CLOSE = 0.10
EXPLAINING = (
    *OPEN_RANGES, *CHOICES, "parameters", "replicas", "global_sync_bandwidth", "step_overhead_s",
    "train_mfu",
)  # fmt: skip
Found = Sequence[tuple[Draw, Figures]]
BOUNDS = 0.05, 0.95


# ---- the draws


def collected(path: Path, family: str, count: int) -> Found:
    """Returns the first `count` draws of a family with their figures; appends those that the file
    lacks.
    """
    known: dict[int, dict[str, float]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["family"] == family:
                known[entry["draw"]] = entry["figures"]
    for number in range(count):
        if number in known:
            continue
        try:
            known[number] = FAMILIES[family](draw(number))
        except ConfigurationError as error:  # what cannot run has no figures
            print(f"{family}, draw {number}: {error}", file=sys.stderr)
            known[number] = {}
        entry = {"family": family, "draw": number, "figures": known[number]}
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")
        print(f"{family}: draw {number + 1} of {count}", file=sys.stderr, flush=True)
    return [(draw(n), known[n]) for n in range(count) if known[n]]


# ---- what they show


def is_close(name: str, value: float) -> bool:
    return abs(value / TARGETS[name] - 1) <= CLOSE


def figure_lines(found: Found) -> Iterator[str]:
    """Yields a table of one family: each figure's spread, how often it is met, and what moves it
    most (rank correlation).
    """
    yield "| figure | published | median | 5 to 95 % | within 10 % | moved most by |"
    yield "|---|---|---|---|---|---|"
    for name in (name for name in TARGETS if name in found[0][1]):
        values = [figures[name] for _, figures in found]
        low, high = np.quantile(values, BOUNDS)
        met = sum(is_close(name, value) for value in values)
        causes = ", ".join(f"{factor} {rank:+.2f}" for factor, rank in strongest(found, name))
        yield (
            f"| `{name}` | {TARGETS[name]:g} | {statistics.median(values):.2f} | {low:.2f} to "
            f"{high:.2f} | {met} of {len(found)} | {causes} |"
        )


def strongest(found: Found, name: str, count: int = 3) -> list[tuple[str, float]]:
    """Returns the factors with the largest rank correlation (Spearman) with a figure."""
    values = _ranks([figures[name] for _, figures in found])
    by_factor: dict[str, float] = {}
    for factor in EXPLAINING:
        ranks = _ranks([one.factors()[factor] for one, _ in found])
        by_factor[factor] = float(np.corrcoef(ranks, values)[0, 1])
    return sorted(by_factor.items(), key=lambda pair: -abs(pair[1]))[:count]


def _ranks(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Returns the mean rank of each value; equal ones have equal ranks."""
    found = np.asarray(values)
    below = (found[None, :] < found[:, None]).sum(axis=1)
    equal = (found[None, :] == found[:, None]).sum(axis=1)
    return below + (equal - 1) / 2


def region_lines(found: Found, factors: int = 2) -> Iterator[str]:
    """Yields a table: each figure by the values, or by the thirds, of the factors that move it
    most. So it states where the published figure holds.
    """
    yield "| figure (published) | factor | where | median | 5 to 95 % | within 10 % |"
    yield "|---|---|---|---|---|---|"
    for name in (name for name in TARGETS if name in found[0][1]):
        for factor, _ in strongest(found, name, factors):
            for where, some in _parts(found, factor):
                values = [figures[name] for _, figures in some]
                low, high = np.quantile(values, BOUNDS)
                met = sum(is_close(name, value) for value in values)
                yield (
                    f"| `{name}` ({TARGETS[name]:g}) | {factor} | {where} | "
                    f"{statistics.median(values):.2f} | {low:.2f} to {high:.2f} | "
                    f"{met} of {len(values)} |"
                )


def _parts(found: Found, factor: str) -> Iterator[tuple[str, Found]]:
    """Yields the draws by the chosen value of a factor, or by thirds of its range."""
    if factor in CHOICES:
        for value in CHOICES[factor]:
            some = [one for one in found if one[0].factors()[factor] == value]
            if some:
                yield f"{value:g}", some
        return
    ordered = sorted(found, key=lambda one: one[0].factors()[factor])
    third = -(-len(ordered) // 3)
    for begin in range(0, len(ordered), third):
        some = ordered[begin : begin + third]
        low, high = (some[at][0].factors()[factor] for at in (0, -1))
        yield f"{low:.3g} to {high:.3g}", some


PAIRS = {
    "laminar_sync": "Laminar before synchronous",
    "laminar_one_step": "Laminar before one-step",
    "laminar_stream": "Laminar before stream",
    "laminar_partial": "Laminar before partial rollout, each under its best split",
    "laminar_partial_75": "Laminar before partial rollout at 75 : 25",
    "partial_one_step": "partial rollout before one-step",
    "partial_stream": "partial rollout before stream",
    "stream_one_step": "stream before one-step",
    "one_step_sync": "one-step before synchronous",
}
"""Published order, by the ratio that is above 1 where it holds."""


def order_lines(found: Found) -> Iterator[str]:
    """Yields the share of draws in which one system is faster than another, with its 90 % interval
    (Wilson). An order is reproduced if the interval is above ½, and refuted if it is below.
    """
    yield "| published order | holds in draws | 90 % interval | ratio, 5 to 95 % | |"
    yield "|---|---|---|---|---|"
    for name, words in PAIRS.items():
        values = [figures[name] for _, figures in found]
        wins = sum(value > 1 for value in values)
        low, high = wilson(wins, len(values))
        verdict = "reproduced" if low > 0.5 else "refuted" if high < 0.5 else "open"
        least, most = np.quantile(values, BOUNDS)
        yield (
            f"| {words} | {wins} of {len(values)} | {low:.2f} to {high:.2f} | {least:.2f} to "
            f"{most:.2f} | {verdict} |"
        )


def wilson(wins: int, count: int, z: float = 1.645) -> tuple[float, float]:
    """Returns the Wilson score interval of a share."""
    share, square = wins / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


JOINT = {
    "repack": (
        ("repack_throughput", "repack_kv_before", "repack_kv_after"),
        ("repack_throughput", "repack_kv_held_before", "repack_kv_held_after"),
    ),
    "laminar": (
        ("laminar_sync", "laminar_one_step"),
        ("laminar_sync", "laminar_one_step", "laminar_partial"),
    ),
    "rhymerl": (
        ("rhymerl_histopipe", "rhymerl_two_tier"),
        ("histopipe_over_sync", "two_tier_over_sync"),
        ("histopipe_over_split_sync", "two_tier_over_split_sync"),
    ),
}  # fmt: skip
"""Figures of one paper that must be met together."""


def joint_lines(family: str, found: Found) -> Iterator[str]:
    """Yields how many draws meet several figures of one paper together, and the ranges of what was
    drawn in these.
    """
    for names in JOINT.get(family, ()):
        met = [one for one, got in found if all(is_close(name, got[name]) for name in names)]
        where = "; ".join(_range(met, factor) for factor in EXPLAINING) if met else ""
        yield f"{', '.join(names)} together: {len(met)} of {len(found)} draws. {where}"


def _range(some: Sequence[Draw], factor: str) -> str:
    values = [one.factors()[factor] for one in some]
    return f"{factor} {min(values):.3g} to {max(values):.3g}"


CHARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Laminar over other systems": {
        "laminar": (
            "laminar_sync", "laminar_one_step", "laminar_stream", "laminar_partial",
            "laminar_partial_75",
        )
    },
    "Repack, RhymeRL and AReaL": {
        "repack": ("repack_throughput", "repack_kv_after"),
        "rhymerl": ("rhymerl_two_tier", "two_tier_over_sync", "two_tier_over_split_sync"),
        "areal": ("areal",),
    },
}  # fmt: skip


def charts(found: Mapping[str, Found]) -> list[Chart]:
    """Returns the figures over their published values, sorted: 1 is the published value."""
    drawn: list[Chart] = []
    for title, families in CHARTS.items():
        named = [(family, name) for family, names in families.items() for name in names]
        series = [
            Series(name, _percentiles(found[family], name), colour)
            for colour, (family, name) in enumerate(named, start=1)
        ]
        bounds = [Series("", [(0.0, at), (100.0, at)], 7, True) for at in (0.9, 1.1)]
        note = "simulated over published, by percentile of the draws; dotted: 10 % from it"
        drawn.append(Chart(title, (*series, *bounds), note, along="percentile"))
    return drawn


def _percentiles(found: Found, name: str) -> list[tuple[float, float]]:
    values = sorted(figures[name] / TARGETS[name] for _, figures in found)
    return [(100 * (at + 0.5) / len(values), value) for at, value in enumerate(values)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.sweep",
        description="Simulate the published figures over what the papers leave open.",
        epilog="example: python -m studies.sweep draws.jsonl --draws 40",
    )
    parser.add_argument("file", type=Path, help="the draws, a line each; missing ones are added")
    parser.add_argument("--draws", type=int, default=40, help="their number in each family")
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append", help="only these")
    parser.add_argument("--svg", type=Path, help="draw the figures of all families to this file")
    chosen = parser.parse_args(arguments)
    families: Sequence[str] = chosen.family or tuple(FAMILIES)
    found = {family: collected(chosen.file, family, chosen.draws) for family in families}
    for family, some in found.items():
        print(f"## {family}, {len(some)} draws\n")
        for lines in (figure_lines(some), region_lines(some), joint_lines(family, some)):
            print("\n".join(lines), end="\n\n")
        if family == "laminar":
            print("\n".join(order_lines(some)), end="\n\n")
    if chosen.svg is not None:
        chosen.svg.write_text(picture(charts(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
