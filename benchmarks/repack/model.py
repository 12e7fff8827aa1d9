"""Scheduling on a model: `examples/longtail-model.toml`, whose policy decides the lengths of its
answers, with and without repack, placement by length and drafts (docs/explanation/scheduling.md).

A round is one run of `plain` and of each arm with a goal, with one seed and one warm model; the
order turns round from one round to the next, and `plain` is the reference of all arms of its round.
The other arms run once. Each result is kept in `runs/repack-model/` at once, so an interrupted
benchmark continues behind its last result, unless the code or the example changed meanwhile; a
complete one removes it.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import xxhash

from benchmarks.case import Case, paired
from benchmarks.repack.model_arm import EXAMPLE, ArmResult, run_arm
from benchmarks.runs.quickstart import warm_model
from testbed.repository import ROOT

PAIRS, PAIRS_QUICK = 5, 1
FOLDER = ROOT / "runs" / "repack-model"
PLAIN = "plain"
_NO_REPACK, _NO_PLACEMENT = "dispatch.repack=false", "dispatch.placement=room"
_NO_DRAFTS = "rollouts.drafts=off"
ARMS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (_NO_REPACK, _NO_PLACEMENT, _NO_DRAFTS),
    "repack": (_NO_PLACEMENT, _NO_DRAFTS),
    "placement": (_NO_REPACK, _NO_DRAFTS),
    "both": (_NO_DRAFTS,),
    "drafts": (_NO_REPACK, _NO_PLACEMENT),
    "in_flight": ("rollouts.on_update=in_flight", _NO_PLACEMENT, _NO_DRAFTS),
    "all_on": (),
}
"""The settings of each arm on top of the example, which has everything on."""
ROUND = (PLAIN, "repack", "placement", "all_on")
"""The arms of each round."""
ONCE = ("both", "drafts", "in_flight")
"""The arms of the first round alone, after its others; a quick benchmark has none of them."""
GOALS: Mapping[str, tuple[str, float | None]] = {
    "repack": ("repack_model", 1.15),
    "placement": ("placement_model", 1.10),
    "all_on": ("all_on_model", 1.5),
    "both": ("repack_model_both", None),
    "drafts": ("repack_model_drafts", None),
    "in_flight": ("repack_model_in_flight", None),
}
"""Case and goal of each arm."""


def cases(quick: bool) -> Iterator[Case]:
    """Yields a case for each arm: its trained tokens per second against those of `plain`."""
    order = run_order(PAIRS_QUICK, ()) if quick else run_order(PAIRS, ONCE)
    base = FOLDER / code_digest()
    found = {name: run_or_recall(base, *name) for name in order}
    for arm in (*ROUND[1:], *(() if quick else ONCE)):
        seeds = sorted(seed for name, seed in order if name == arm)
        mine, plain = ([found[name, seed] for seed in seeds] for name in (arm, PLAIN))
        yield arm_case(arm, mine, plain)
    shutil.rmtree(FOLDER)


Name = tuple[str, int]
"""An arm and its seed."""


def run_order(rounds: int, once: Sequence[str]) -> list[Name]:
    """Returns the runs in order: the arms of each round, in odd rounds turned round, and `once` at
    the end of the first.
    """
    order: list[Name] = []
    for seed in range(rounds):
        arms = ROUND[::-1] if seed % 2 else (*ROUND, *(() if seed else once))
        order += [(arm, seed) for arm in arms]
    return order


def run_or_recall(base: Path, arm: str, seed: int) -> ArmResult:
    """Returns the kept result, or runs the arm and keeps its result."""
    path = base / f"{seed}-{arm}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=ArmResult)
    folder = base / "run"
    shutil.rmtree(folder, ignore_errors=True)
    settings = (f"seed={seed}", f"model.path={warm_model(base, EXAMPLE)}", *ARMS[arm])
    result = run_arm(folder, settings)
    path.write_bytes(msgspec.json.encode(result))
    print(f"repack_model: {arm}, seed {seed}: {words(result)}", file=sys.stderr, flush=True)
    return result


def code_digest() -> str:
    """Returns a hash of the product's code and the example: results of other code are not used."""
    digest = xxhash.xxh3_64()
    for folder in ("rollstream", "streams", "storage", "producers", "consumers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update(EXAMPLE.read_bytes())
    return digest.hexdigest()


def arm_case(arm: str, mine: Sequence[ArmResult], plain: Sequence[ArmResult]) -> Case:
    """Returns the case of an arm, with the medians of both sides in its note."""
    case, goal = GOALS[arm]
    ratios = sorted(p.processor_us / m.processor_us for m, p in zip(mine, plain, strict=True))
    note = (
        f"by processor time {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); {arm}: "
        f"{words(_middle(mine))}; plain: {words(_middle(plain))}"
    )
    values = [result.tokens_per_s for result in mine]
    reference = [result.tokens_per_s for result in plain]
    return paired(case, values, "tok/s", "plain keep_version", reference, goal, note)


def _middle(results: Sequence[ArmResult]) -> ArmResult:
    """Returns the result of the median speed (of an even number the slower one)."""
    return sorted(results, key=lambda result: result.tokens_per_s)[(len(results) - 1) // 2]


def words(result: ArmResult) -> str:
    """Returns a result as text."""
    r = result
    parts = [
        f"{r.tokens_per_s:,.0f} tok/s",
        f".75 after {r.to_75_s:.0f} s" if r.to_75_s is not None else ".75 not reached",
        f"reward {r.reward:.2f}",
        f"lengths {r.length_median:.0f} / {r.length_p99:.0f} / {r.length_max} (median, p99, most; "
        f"{r.forced:.1%} cut)",
        f"{r.batch:.1f} rows, {r.decode_us:.0f} + {r.train_us:.0f} µs a token",
        f"draining {r.slots.draining:.0%}, slots running {r.slots.running:.0%}",
    ]
    if r.moved.moves:
        parts.append(
            f"{r.moved.moves} moves of {r.moved.requests} requests, {r.moved.tokens:,} tokens "
            "prefilled again"
        )
    if r.drafted.guessed:
        d = r.drafted
        parts.append(
            f"{d.accepted / d.guessed:.0%} of drafts accepted, {d.tokens / d.passes:.1f} tokens a "
            "pass"
        )
    return ", ".join(parts)
