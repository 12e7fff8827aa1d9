"""Draws jointly what the papers leave open, simulates every published figure under each draw, and
prints where the figures hold: `python -m benchmarks.simulator.sweep DRAWS.jsonl [--draws 60]`.

What is open: lengths, KV capacity, slots, split of the GPUs, size of a group, outstanding work, and
all assumed constants. The file has a line per draw; a repeated command adds those that are missing.
`--svg FILE` draws the figures over their published values.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.histospec.plot import picture
from benchmarks.simulator.runs import LARGE, WHOLE, SetUp, bench
from benchmarks.simulator.simulator import PUBLISHED
from rollstream.errors import ConfigurationError
from rollstream.report.page import Chart, Series
from rollstream.simulator.constants import CONSTANTS
from rollstream.simulator.policies import policy_of
from rollstream.simulator.results import SimulationResult

LAMINAR_SCALE, RHYMERL_SCALE, AREAL_SCALE = 16, 8, 8
RHYMERL, AREAL = ("qwen3-14b", 128), ("qwen2.5-7b", 128)
ORDER = ("synchronous", "one_step", "stream", "partial_rollout", "laminar")
CLOSE = 0.10
BATCH = 8192  # answers of a step
STEPS = {"steps": 8.0, "steps_skipped": 3.0}
OPEN_RANGES = {
    "length_median": (400.0, 6_000.0),
    "length_p99_over_median": (3.0, 20.0),
    "length_between_prompts": (0.3, 0.97),
    "memory_share": (0.35, 0.9),
    "memory_share_colocated": (0.35, 0.85),
    "slots": (64.0, 1_024.0),
    "waves_outstanding": (2.0, 9.0),
}
"""Wider than those of the constants; lengths, slots and the tail are drawn by their logarithm."""
LOGARITHMIC = {"length_median", "length_p99_over_median", "slots"}
SAMPLES, SPLITS = (4, 8, 16, 32), (0.25, 0.375, 0.5, 0.625, 0.75)
EXPLAINING = (*OPEN_RANGES, "samples_per_group", "rollout_share", "global_sync_bandwidth",
              "step_overhead_s", "train_mfu")  # fmt: skip
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Draw:
    """One joint draw: constants, the split of the GPUs, and Laminar's model on its GPUs."""

    number: int
    constants: dict[str, float]
    rollout_share: float
    set_up: SetUp

    def factors(self) -> dict[str, float]:
        return {**self.constants, "rollout_share": self.rollout_share}


def draw(number: int) -> Draw:
    """Returns the draw of this number, always the same."""
    random = np.random.default_rng([21, number])
    constants = dict(STEPS)
    ranges = {name: (c.low, c.high) for name, c in CONSTANTS.items() if c.low < c.high}
    for name, (low, high) in {**ranges, **OPEN_RANGES}.items():
        if name in LOGARITHMIC:
            value = math.exp(random.uniform(math.log(low), math.log(high)))
        else:
            value = float(random.uniform(low, high))
        constants[name] = round(value) if name in WHOLE else value
    samples = int(random.choice(SAMPLES))
    constants |= {"samples_per_group": samples, "groups_per_step": BATCH // samples}
    share = float(random.choice(SPLITS))
    return Draw(number, constants, share, LARGE[int(random.integers(len(LARGE)))])


def figures(one: Draw) -> dict[str, float]:
    """Returns the published figures as simulated under this draw, by their names in `PUBLISHED`."""
    found = _runs(one.set_up, LAMINAR_SCALE, one, (*ORDER, "laminar-repack"), one.rollout_share)
    speed = {name: result.tokens_per_s for name, result in found.items()}
    rhymerl = _runs(
        RHYMERL, RHYMERL_SCALE, one,
        ("one_step", "rhymerl-ramp-migration-drafts", "rhymerl-drafts"), one.rollout_share,
    )  # fmt: skip
    base = rhymerl["one_step"].tokens_per_s
    constants = {**one.constants, "waves_outstanding": CONSTANTS["areal_eta"].value + 1}
    areal = _runs(
        AREAL, AREAL_SCALE, Draw(one.number, constants, 0.0, AREAL),
        ("synchronous", "partial_rollout"), CONSTANTS["areal_rollout_share"].value,
    )  # fmt: skip
    with_, without = found["laminar"], found["laminar-repack"]
    return {
        "laminar_sync": speed["laminar"] / speed["synchronous"],
        "laminar_one_step": speed["laminar"] / speed["one_step"],
        "laminar_stream": speed["laminar"] / speed["stream"],
        "laminar_partial": speed["laminar"] / speed["partial_rollout"],
        "repack_throughput": with_.generated_per_s / without.generated_per_s,
        "repack_kv_before": without.kv_utilisation,
        "repack_kv_after": with_.kv_utilisation,
        "rhymerl_histopipe": rhymerl["rhymerl-ramp-migration-drafts"].tokens_per_s / base,
        "rhymerl_two_tier": rhymerl["rhymerl-drafts"].tokens_per_s / base,
        "areal": areal["partial_rollout"].tokens_per_s / areal["synchronous"].tokens_per_s,
    }


def _runs(
    where: SetUp, scale: int, one: Draw, names: Sequence[str], share: float
) -> dict[str, SimulationResult]:
    on = bench(where, scale, one.constants)
    return {name: on.run(policy_of(name), share) for name in names}


# ---- the draws


def collected(path: Path, count: int) -> list[tuple[Draw, Figures]]:
    """Returns the first `count` draws with their figures; appends those that the file lacks."""
    known: dict[int, dict[str, float]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            known[entry["draw"]] = entry["figures"]
    for number in range(count):
        if number in known:
            continue
        try:
            known[number] = figures(draw(number))
        except ConfigurationError as error:  # what cannot run has no figures
            print(f"draw {number}: {error}", file=sys.stderr)
            known[number] = {}
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"draw": number, "figures": known[number]}) + "\n")
        print(f"draw {number + 1} of {count}", file=sys.stderr, flush=True)
    return [(draw(n), known[n]) for n in range(count) if known[n]]


# ---- what they show


def is_close(name: str, value: float) -> bool:
    return abs(value / PUBLISHED[name] - 1) <= CLOSE


def figure_lines(found: Sequence[tuple[Draw, Figures]]) -> Iterator[str]:
    """Yields a table: each figure's spread, how often it is met, what moves it most, and the
    factors under which it is met.
    """
    yield "| figure | published | median | 5 to 95 % | within 10 % | moved most by | region |"
    yield "|---|---|---|---|---|---|---|"
    for name, published in PUBLISHED.items():
        values = [figures_[name] for _, figures_ in found]
        fits = [one for one, figures_ in found if is_close(name, figures_[name])]
        low, high = np.quantile(values, [0.05, 0.95])
        moving = strongest(found, name)
        causes = ", ".join(f"{factor} ({rank:+.2f})" for factor, rank in moving)
        region = "; ".join(_range(fits, factor) for factor, _ in moving) if fits else "none"
        yield (
            f"| `{name}` | {published:g} | {statistics.median(values):.2f} | {low:.2f} to "
            f"{high:.2f} | {len(fits)} of {len(found)} | {causes} | {region} |"
        )


def strongest(
    found: Sequence[tuple[Draw, Figures]], name: str, count: int = 3
) -> list[tuple[str, float]]:
    """Returns the factors with the largest rank correlation (Spearman) with a figure."""
    values = _ranks([figures_[name] for _, figures_ in found])
    by_factor = {
        factor: float(
            np.corrcoef(_ranks([one.factors()[factor] for one, _ in found]), values)[0, 1]
        )
        for factor in EXPLAINING
    }
    return sorted(by_factor.items(), key=lambda pair: -abs(pair[1]))[:count]


def _ranks(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    order = np.argsort(np.argsort(np.asarray(values), kind="stable"), kind="stable")
    return order.astype(np.float64)


def _range(fits: Sequence[Draw], factor: str) -> str:
    values = [one.factors()[factor] for one in fits]
    return f"{factor} {min(values):.3g} to {max(values):.3g}"


def order_lines(found: Sequence[tuple[Draw, Figures]]) -> Iterator[str]:
    """Yields, for each system that Laminar was compared with, the share of draws in which Laminar
    is faster, with its 90 % interval (Wilson).
    """
    yield "| Laminar is faster than | in draws | 90 % interval |"
    yield "|---|---|---|"
    for other in ("sync", "one_step", "stream", "partial"):
        wins = sum(figures_[f"laminar_{other}"] > 1 for _, figures_ in found)
        low, high = wilson(wins, len(found))
        yield f"| {other} | {wins} of {len(found)} | {low:.2f} to {high:.2f} |"


def wilson(wins: int, count: int, z: float = 1.645) -> tuple[float, float]:
    """Returns the Wilson score interval of a share."""
    share, square = wins / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


CHARTS = {
    "Laminar over other systems": (
        "laminar_sync", "laminar_one_step", "laminar_stream", "laminar_partial",
    ),
    "Repack, RhymeRL and AReaL": (
        "repack_throughput", "repack_kv_after", "rhymerl_histopipe", "rhymerl_two_tier", "areal",
    ),
}  # fmt: skip


def charts(found: Sequence[tuple[Draw, Figures]]) -> list[Chart]:
    """Returns the figures over their published values, sorted: 1 is the published value."""
    along = [100 * (index + 0.5) / len(found) for index in range(len(found))]
    drawn: list[Chart] = []
    for title, names in CHARTS.items():
        series = [
            Series(
                name,
                [*zip(along, sorted(got[name] / PUBLISHED[name] for _, got in found), strict=True)],
                colour,
            )
            for colour, name in enumerate(names, start=1)
        ]
        bounds = [Series("", [(along[0], at), (along[-1], at)], 7, True) for at in (0.9, 1.1)]
        note = "simulated over published, by percentile of the draws; dotted: 10 % from it"
        drawn.append(Chart(title, (*series, *bounds), note, along="percentile"))
    return drawn


def joint_lines(found: Sequence[tuple[Draw, Figures]]) -> Iterator[str]:
    """Yields how many draws meet several figures of one paper together."""
    for names in (
        ("repack_throughput", "repack_kv_before", "repack_kv_after"),
        ("laminar_sync", "laminar_one_step"),
        ("laminar_sync", "laminar_one_step", "laminar_partial"),
        ("rhymerl_histopipe", "rhymerl_two_tier"),
    ):
        met = [one for one, got in found if all(is_close(name, got[name]) for name in names)]
        yield f"{', '.join(names)} together: {len(met)} of {len(found)} draws"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator.sweep",
        description="Simulate the published figures over what the papers leave open.",
        epilog="example: python -m benchmarks.simulator.sweep draws.jsonl --draws 60",
    )
    parser.add_argument("file", type=Path, help="the draws, a line each; missing ones are added")
    parser.add_argument("--draws", type=int, default=60, help="their number")
    parser.add_argument("--svg", type=Path, help="draw the figures to this file")
    chosen = parser.parse_args(arguments)
    found = collected(chosen.file, chosen.draws)
    if chosen.svg is not None:
        chosen.svg.write_text(picture(charts(found)), encoding="utf-8")
    for lines in (figure_lines(found), order_lines(found), joint_lines(found)):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
