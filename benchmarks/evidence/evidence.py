"""What the committed runs say (`rows.py`): paired differences of held-out accuracy between arms,
recounted from the rows, each with its interval, power and number of seeds.

A case is decided with `SEEDS_MIN` pairs or more; below it prints what there is and that it is
not decided. Two rows are made again, unless the cases are quick or the machine is another kind than
that of the rows.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance

import numpy as np
from numpy.typing import NDArray

from benchmarks.case import Case, alone
from rollstream.look.query.intervals import bootstrap_interval
from rollstream.run.config.policy_defaults import DEFAULT_PRESET
from studies.evidence.arms import ARMS, CHOICES, LAGS, ROLES, STRESSES, WORLDS
from studies.evidence.comparisons import MARGIN, SEEDS_MIN, Comparison, comparisons, count
from studies.evidence.log import LOGGED_SEED
from studies.evidence.pieces import Piece, machine, made_run, replayed_hash
from studies.evidence.rows import EvidenceRow, by_seed, read_facts, read_rows, recounted

COLLAPSE = -0.2  # a run that ends so far below its reference has collapsed
COLLAPSED_MIN = 5  # runs of each kind, below which the area under the curve is not decided
LAG_ARM = f"lag8_{DEFAULT_PRESET}"
TOKEN_RATIOS = tuple(
    f"stress_{n}" for n in ("truncated_is", "dapo", "cispo", "dppo", "decoupled_ppo")
)
REPLAYED = (LAG_ARM, "stress_truncated_is", "flow_in_flight")
FIRST = next(iter(WORLDS))


def cases(quick: bool) -> Iterator[Case]:
    """Yields the cases from the committed rows; two runs are repeated unless `quick`."""
    rows = list(read_rows())
    wrong = [f"{r.world} {r.arm} {r.seed}: {what}" for r in rows if (what := recounted(r))]
    note = f"of {count(len(rows), 'row')}" + (f"; {wrong[0]}" if wrong else "")
    case = alone("evidence_recount", len(wrong), "rows", at_most=0.0, note=note)
    yield _decided(case, [] if rows else ["no rows"])
    if not quick:
        yield repeated(rows)
        yield replayed(rows)
    yield like_roles(rows)
    yield lag_difference(rows)
    yield lag_loss(rows)
    yield stress("stress_uncorrected", "stress_uncorrected", rows, at_most=COLLAPSE)
    yield stress("stress_default", f"stress_{DEFAULT_PRESET}", rows, at_least=-MARGIN)
    yield paired_share(rows)
    yield auroc(rows)


def repeated(rows: Sequence[EvidenceRow]) -> Case:
    """The number of rows, of two made again, whose state or accuracy has other bits."""

    def differs(row: EvidenceRow, piece: Piece, scratch: Path) -> bool:
        again = made_run(piece, scratch, lambda line: None).row
        return (row.state_hash, row.by_prompt) != (again.state_hash, again.by_prompt)

    return _made_again("evidence_repeated", "rows", rows, ("lag0", LAG_ARM), differs)


def replayed(rows: Sequence[EvidenceRow]) -> Case:
    """The number of logs, of one of each kind of arms, whose training ends with another hash than
    their row has: nothing is generated. `python -m studies.evidence_runs --replay` does all.
    """

    def differs(row: EvidenceRow, piece: Piece, scratch: Path) -> bool:
        return row.state_hash != replayed_hash(piece, scratch)

    return _made_again("evidence_replayed", "logs", rows, REPLAYED, differs)


def _made_again(
    name: str,
    unit: str,
    rows: Sequence[EvidenceRow],
    arms: Sequence[str],
    differs: Callable[[EvidenceRow, Piece, Path], bool],
) -> Case:
    """The number of differing ones among the logged seeds of these arms. Machines of another kind
    round differently: there it is not decided.
    """
    ours = [row for row in rows if row.machine == machine() and row.world == FIRST]
    chosen = [row for row in ours if row.seed == LOGGED_SEED and row.arm in arms]
    with tempfile.TemporaryDirectory() as scratch:
        differing = sum(
            differs(row, Piece(WORLDS[row.world], ARMS[row.arm], row.seed), Path(scratch))
            for row in chosen
        )
    note = ", ".join(f"{row.world} {row.arm} seed {row.seed}" for row in chosen)
    case = alone(name, differing, unit, at_most=0.0, note=note)
    missing = [] if len(chosen) == len(arms) else [f"not all {unit} are of this kind of machine"]
    return _decided(case, missing)


def like_roles(rows: Sequence[EvidenceRow]) -> Case:
    """The share of the trajectories that a synchronous run of the product's processes trained which
    the stepped run of its seed trained in the same step, with the same length and reward.
    """
    shares: list[float] = []
    for seed, row in by_seed(rows, FIRST, ROLES).items():
        stepped = by_seed(rows, FIRST, "lag0").get(seed)
        if stepped is not None:
            theirs, ours = _trained(row), _trained(stepped)
            same = sum(ours.get(name) == found for name, found in theirs.items())
            shares.append(same / len(theirs))
    value = fmean(shares) if shares else math.nan
    note = f"{count(len(shares), 'run')} of processes"
    return _decided(alone("evidence_roles", value, "share", at_least=0.99, note=note), [])


def _trained(row: EvidenceRow) -> dict[tuple[int, int], tuple[int, int, float]]:
    """By group and index, the step, length and reward of each trajectory of the row's steps."""
    return {
        (one["group"], one["index"]): (one["step"], one["tokens"], one["reward"])
        for one in read_facts(row).to_pylist()
        if one["step"] is not None and one["step"] <= row.step
    }


def lag_difference(rows: Sequence[EvidenceRow]) -> Case:
    """The largest absolute end of the 90 % intervals over the worlds, of the default at a lag of 8
    against it without lag; the note has the other lags and losses, too.
    """
    found = comparisons(rows, [LAG_ARM])
    value = max((end for one in found if (end := one.farthest) is not None), default=math.nan)
    others = [one.name for one in (*LAGS, *CHOICES) if one.reference and one.name != LAG_ARM]
    texts = [*found, *(one for one in comparisons(rows, others) if one.pairs)]
    note = "; ".join(one.text() for one in texts)
    case = alone("lag8_difference", value, "accuracy", at_most=MARGIN, note=note)
    few = {one.world for one in found if len(one.pairs) < SEEDS_MIN}
    worlds = f"worlds {len(WORLDS) - len(few)} of {len(WORLDS)}"
    return _decided(case, [*_too_few(found), worlds] if few else [])


def lag_loss(rows: Sequence[EvidenceRow]) -> Case:
    """The lowest end of the same intervals: one-sided (95 %), the default loses no more in any of
    the worlds. Its objective was chosen by these rows, so this explores and confirms nothing.
    """
    found = comparisons(rows, [LAG_ARM])
    value = min((t.low for one in found if (t := one.test) is not None), default=math.nan)
    note = f"one-sided, 95 %, by rows that chose {DEFAULT_PRESET}; "
    note += "; ".join(one.text() for one in found)
    case = alone("lag8_not_worse", value, "accuracy", at_least=-MARGIN, note=note)
    few = {one.world for one in found if len(one.pairs) < SEEDS_MIN}
    worlds = f"worlds {len(WORLDS) - len(few)} of {len(WORLDS)}"
    return _decided(case, [*_too_few(found), worlds] if few else [])


def stress(
    name: str,
    arm: str,
    rows: Sequence[EvidenceRow],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Case:
    """The mean difference of a stressed arm to the same stress without lag: of the worlds that have
    such runs the worst, for an arm that must collapse the best.
    """
    found = comparisons(rows, [arm])
    means = [mean for one in found if (mean := one.mean) is not None]
    value = (min if at_least is not None else max)(means, default=math.nan)
    others = [one.name for one in STRESSES if one.reference and one.name != arm]
    texts = [*found, *(one for one in comparisons(rows, others) if one.pairs)]
    note = "; ".join(one.text() for one in texts)
    case = alone(name, value, "accuracy", at_least=at_least, at_most=at_most, note=note)
    return _decided(case, _too_few(found))


def paired_share(rows: Sequence[EvidenceRow]) -> Case:
    """The variance of the paired differences over that of unpaired ones, which is the sum of both
    arms' variances; the mean over the arms with lag, of those with enough seeds if there are any.
    """
    found = comparisons(rows, [arm.name for arm in (*LAGS, *CHOICES) if arm.schedule.lag])
    seeds = max(len(one.pairs) for one in found)
    used = [one for one in found if len(one.pairs) >= max(2, min(seeds, SEEDS_MIN))]
    shares: list[float] = []
    for one in used:
        first, second = zip(*((a.accuracy, b.accuracy) for a, b in one.pairs), strict=True)
        apart = variance(first) + variance(second)
        together = variance([b - a for a, b in zip(first, second, strict=True)])
        shares.append(together / apart if apart else math.nan)
    each = ", ".join(
        f"{one.world} {one.arm} {share:.2f} of {count(len(one.pairs), 'seed')}"
        for one, share in zip(used, shares, strict=True)
    )
    value = fmean(shares) if shares else math.nan
    note = f"unpaired: 1; {each or 'no pairs'}"
    case = alone("paired_variance", value, "share", at_most=0.5, note=note)
    return _decided(case, _too_few(used))


def auroc(rows: Sequence[EvidenceRow]) -> Case:
    """The area under the ROC curve of the ESS over a run's first half of steps as a predictor of
    its collapse, over all stale runs of stress that have a reference, with a bootstrap interval by
    run. The note has other predictors, and the ESS where it is that of token ratios: an arm without
    weights has an ESS of 1, and the product ratios of TOPR have a low one.
    """
    stale = [arm for arm in STRESSES if arm.schedule.lag]
    found = comparisons(rows, [arm.name for arm in stale])
    pairs = [pair for one in found for pair in one.pairs]
    collapsed = np.array([b.accuracy - a.accuracy <= COLLAPSE for a, b in pairs], bool)

    def risks(metric: str, sign: int) -> NDArray[np.float64]:
        """`sign` times the early mean of a metric, of each run."""
        return np.array([sign * early(b, metric) for _, b in pairs], np.float64)

    by_ess = risks("ess", -1)
    value = area(by_ess, collapsed)
    low, high = (
        bootstrap_interval(len(pairs), lambda drawn: area(by_ess[drawn], collapsed[drawn]))
        if pairs and not math.isnan(value)
        else (math.nan, math.nan)
    )
    by_token = np.array([b.arm in TOKEN_RATIOS for _, b in pairs], bool)
    others = (("KL", "kl", 1), ("gradient norm", "gradient_norm", 1), ("entropy", "entropy", -1))
    texts = [f"{name} {area(risks(metric, sign), collapsed):.2f}" for name, metric, sign in others]
    texts.append(f"ESS of token ratios {area(by_ess[by_token], collapsed[by_token]):.2f}")
    down, up = int(collapsed.sum()), int((~collapsed).sum())
    note = f"95 % interval {low:.2f} to {high:.2f}; {down} runs collapsed, {up} did not"
    note += f"; other predictors: {', '.join(texts)}"
    case = alone("ess_auroc", value, "area", at_least=0.9, note=note)
    few = min(down, up) < COLLAPSED_MIN
    return _decided(case, [f"fewer than {COLLAPSED_MIN} runs of a kind"] if few else [])


def early(row: EvidenceRow, metric: str) -> float:
    """Returns the mean of a metric over the first half of a run's steps."""
    values = row.steps.get(metric, [])
    known = [value for value in values[: max(1, len(values) // 2)] if value is not None]
    return fmean(known) if known else 0.0


def area(risks: NDArray[np.float64], collapsed: NDArray[np.bool_]) -> float:
    """Returns the share of pairs (collapsed, not collapsed) in which the collapsed run has the
    higher risk, ties as a half (Mann and Whitney, 1947); nan without such a pair.
    """
    above, below = risks[collapsed], risks[~collapsed]
    if not len(above) or not len(below):
        return math.nan
    apart = above[:, None] - below[None, :]
    return float(((apart > 0) + 0.5 * (apart == 0)).mean())


def _too_few(found: Sequence[Comparison]) -> list[str]:
    """Returns what is missing if a comparison that has pairs has too few seeds, or none has any."""
    seeds = min((len(one.pairs) for one in found if one.pairs), default=0)
    return [f"{count(seeds, 'seed')} of {SEEDS_MIN}"] if seeds < SEEDS_MIN else []


def _decided(case: Case, missing: Sequence[str]) -> Case:
    """Returns the case, without a verdict where something is missing: it is never met then."""
    if not missing and not math.isnan(case.value):
        return case
    why = ", ".join(missing) or "no data"
    return replace(case, met=None, note=f"NOT DECIDED ({why}); {case.note}")
