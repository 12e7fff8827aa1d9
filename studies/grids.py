"""Two or three factors at a time, at the base values of all others: where a published figure holds.
`python -m studies.grids [partial repack rhymerl]` prints one table each.

`sweep` draws all that is open jointly and shows what moves a figure; these tables show the region.
A cell is the mean over the set-ups, with the smallest and the largest of the seeds.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.simulator.runs import LARGE, SetUp, bench
from benchmarks.simulator.simulator import PUBLISHED
from rollstream.simulator.constants import CONSTANTS, ROLLOUT_SHARES
from rollstream.simulator.policies import SYNCHRONOUS, SchedulingPolicy, policy_of
from studies.draws import RHYMERL, RHYMERL_SCALE, SPLIT_SYNCHRONOUS

SCALE = 16
SEEDS = (0, 1)
LAGS, UPDATES = (1, 2, 4, 8), (1, 2, 4)
REPACK, REPACK_SCALE = "qwen2.5-32b", 4
QUOTAS, MEDIANS, GPUS = (1, 2, 4, 8), (1_638, 3_276), (64, 128, 256)
STEPS = {"steps": 8.0, "steps_skipped": 3.0}


def partial() -> Iterator[str]:
    """Laminar over partial rollout, each under its best split, by the lag bound of partial rollout
    (in batches) and by how often it sends weights per batch.
    """
    yield f"Laminar over partial rollout, {PUBLISHED['laminar_partial']:g} published"
    yield "| η | " + " | ".join(f"weights sent {count} × per batch" for count in UPDATES) + " |"
    yield "|---|" + "---|" * len(UPDATES)
    laminar = {
        (where, seed): _best(where, "laminar", STEPS, seed) for where in LARGE for seed in SEEDS
    }
    for lag in LAGS:
        cells: list[str] = []
        for updates in UPDATES:
            ratios = [
                statistics.fmean(
                    laminar[where, seed]
                    / _best(where, "partial_rollout", _bounded(lag, updates), seed)
                    for where in LARGE
                )
                for seed in SEEDS
            ]
            cells.append(_cell(ratios))
        yield f"| {lag} | " + " | ".join(cells) + " |"


def _best(where: SetUp, policy: str, constants: Mapping[str, float], seed: int) -> float:
    return bench(where, SCALE, constants, seed).best(policy_of(policy))[1].tokens_per_s


def _bounded(lag: int, updates: int) -> dict[str, float]:
    """Returns the constants of a system with this bound whose steps are 1/`updates` of a batch."""
    groups = CONSTANTS["groups_per_step"].value
    return {
        "groups_per_step": groups // updates,
        "waves_outstanding": (lag + 1) * updates,
        "train_fixed_s": CONSTANTS["train_fixed_s"].value / updates,
        "steps": STEPS["steps"] * updates,
        "steps_skipped": STEPS["steps_skipped"] * updates,
    }


def repack() -> Iterator[str]:
    """Laminar's repack by the answers that a rollout takes under one version (in shares of a
    batch), the GPUs, and the median length.
    """
    yield (
        f"repack's gain in generated tokens/s ({PUBLISHED['repack_throughput']:g} published), KV "
        "used before and after, and the same while a cache holds anything "
        f"({PUBLISHED['repack_kv_before']:.1%} and {PUBLISHED['repack_kv_after']:.1%}), largest lag"
    )
    yield "| GPUs (32B) | median | share of a batch | gain | KV used | while held | lag |"
    yield "|---|---|---|---|---|---|---|"
    for gpus in GPUS:
        for median in MEDIANS:
            for quota in QUOTAS:
                constants = {
                    **STEPS, "quota_waves": quota, "length_median": median,
                    "waves_outstanding": max(CONSTANTS["waves_outstanding"].value, quota + 1),
                }  # fmt: skip
                on = bench((REPACK, gpus), REPACK_SCALE, constants)
                after, before = (
                    on.run(policy_of(name), 0.5) for name in ("laminar", "laminar-repack")
                )
                yield (
                    f"| {gpus} | {median} | {quota} | "
                    f"{after.generated_per_s / before.generated_per_s:.2f} | "
                    f"{before.kv_utilisation:.0%} → {after.kv_utilisation:.0%} | "
                    f"{before.kv_utilisation_held:.0%} → {after.kv_utilisation_held:.0%} | "
                    f"{after.lag_max()} |"
                )


def rhymerl() -> Iterator[str]:
    """RhymeRL without drafts over three baselines, by the split of the GPUs."""
    low, high = PUBLISHED["rhymerl_histopipe"], PUBLISHED["rhymerl_two_tier"]
    yield f"one tier, and two tiers with migration: {low:g} and {high:g} published"
    yield "| rollouts' share | over one-step | over synchronous | over the same split in turn |"
    yield "|---|---|---|---|"
    tiers = policy_of("rhymerl-ramp-migration-drafts"), policy_of("rhymerl-drafts")
    bases = policy_of("one_step"), SYNCHRONOUS, SPLIT_SYNCHRONOUS
    for share in ROLLOUT_SHARES:
        speeds = {
            policy.name: [_speed(policy, share, seed) for seed in SEEDS]
            for policy in (*tiers, *bases)
        }
        cells = [
            " and ".join(
                _cell([a / b for a, b in zip(speeds[tier.name], speeds[base.name], strict=True)])
                for tier in tiers
            )
            for base in bases
        ]
        yield f"| {share:g} | " + " | ".join(cells) + " |"


def _speed(policy: SchedulingPolicy, share: float, seed: int) -> float:
    return bench(RHYMERL, RHYMERL_SCALE, STEPS, seed).run(policy, share).tokens_per_s


def _cell(ratios: Sequence[float]) -> str:
    return f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


GRIDS: Mapping[str, Callable[[], Iterator[str]]] = {
    "partial": partial,
    "rhymerl": rhymerl,
    "repack": repack,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.grids",
        description="Simulate a published figure over two or three factors at a time.",
        epilog="example: python -m studies.grids partial",
    )
    parser.add_argument("grids", nargs="*", metavar="GRID", help=f"of {', '.join(GRIDS)}; else all")
    chosen = parser.parse_args(arguments).grids or list(GRIDS)
    for name in chosen:
        if name not in GRIDS:
            parser.error(f"{name!r} is no grid: {', '.join(GRIDS)}")
        for line in GRIDS[name]():
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
