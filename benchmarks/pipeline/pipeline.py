"""The whole system on two cores against a plain loop and against its own synchronous schedule.

The arms of every pair run one after the other on the same machine from the same warm model: the
plain loop (`plain_loop.py`, with one and with two torch threads; the faster in the first pair
counts), the product as the quickstart configures it, and the product with the synchronous schedule
(`max_lag` 0). Evaluation is not timed: stored versions are evaluated afterwards.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, alone, paired
from benchmarks.runs.measured import Measured, evaluated, run
from benchmarks.runs.quickstart import ASYNC, QUICKSTART, warm_model

PAIRS, PAIRS_QUICK = 5, 1
SAMPLES = 16  # per held-out prompt, for the accuracy after the last step
TRL_S = 180.0  # GRPOTrainer from the same warm-up with two threads, measured once
TARGET = 0.75
SYNC = [*ASYNC, "dispatch.max_lag=0"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Trained tokens per second of the plain loop by thread count, and the two runs of the
    product.
    """

    plain: Mapping[int, float]
    ours: Measured
    sync: Measured


def cases(quick: bool) -> Iterator[Case]:
    """Pipeline against the plain loop and against the synchronous schedule; accuracy, busy share,
    time to .75, memory.
    """
    with tempfile.TemporaryDirectory(prefix="rollstream-pipeline-") as scratch:
        base = Path(scratch)
        warm = warm_model(base)
        runs = [_pair(base, warm, 0, (1, 2))]
        better = max(runs[0].plain, key=lambda threads: runs[0].plain[threads])
        for pair in range(1, PAIRS_QUICK if quick else PAIRS):
            runs.append(_pair(base, warm, pair, (better,)))
        plain = [one.plain[better] for one in runs]
        ours, sync = [one.ours for one in runs], [one.sync for one in runs]
        speeds = [m.tokens_per_s for m in ours]
        seen = ", ".join(f"{n} threads {v:,.0f}" for n, v in runs[0].plain.items())
        loop = f"plain loop of {better} thread{'s' if better > 1 else ''} (first pair: {seen})"
        yield paired("pipeline_vs_plain_loop", speeds, "token/s", loop, plain, 1.1)
        in_step = [m.tokens_per_s for m in sync]
        yield paired("pipeline_async_speedup", speeds, "token/s", "synchronous schedule", in_step)
        yield _busy(ours)
        yield from _accuracy(ours, sync)
        yield _time_to_target(ours)
        yield from _memory(ours)


def _pair(base: Path, warm: Path, pair: int, threads: Sequence[int]) -> Pair:
    """Runs one of each, one after the other; the plain loop with each of these thread counts."""
    given = [f"model.path={warm}", f"seed={pair}"]
    ours = run(QUICKSTART, base / f"ours-{pair}", [*given, *ASYNC])
    plain = {count: _plain(ours.folder, count) for count in threads}
    return Pair(plain, ours, run(QUICKSTART, base / f"sync-{pair}", [*given, *SYNC]))


def _plain(folder: Path, threads: int) -> float:
    """Trained tokens per second of the plain loop on the same configuration."""
    command = [sys.executable, "-m", "benchmarks.pipeline.plain_loop", str(folder / "config.json")]
    environment = {"OMP_NUM_THREADS": str(threads), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "--threads", str(threads)],
        check=True,
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return result["tokens"] / result["seconds"]


def _busy(ours: Sequence[Measured]) -> Case:
    shares = [m.busy for m in ours]
    note = f"of two cores; {_spread(shares)}"
    return alone("pipeline_busy", statistics.median(shares), "share", at_least=0.85, note=note)


def _accuracy(ours: Sequence[Measured], sync: Sequence[Measured]) -> Iterator[Case]:
    def last(m: Measured) -> float:
        step = max(m.done_s)
        return evaluated(m.folder, [step], SAMPLES)[step]["accuracy_sampled"]

    here, there = [last(m) for m in ours], [last(m) for m in sync]
    gap = statistics.fmean(there) - statistics.fmean(here)
    note = f"asynchronous {_spread(here)}, synchronous {_spread(there)}"
    yield alone("pipeline_accuracy_gap", gap, "accuracy", at_most=0.02, note=note)


def _time_to_target(ours: Sequence[Measured]) -> Case:
    """Seconds from the first admission to the first evaluated version at `TARGET`, linear between
    versions.
    """
    times = [_reached(m) for m in ours]
    note = f"{_spread(times)}; TRL's GRPOTrainer took {TRL_S:.0f} s, the mark is a seventh of it"
    value = statistics.median(times)
    return alone("time_to_75", value, "s", at_most=TRL_S / 7, note=note)


def _reached(m: Measured) -> float:
    """Evaluates every fifth version, the early ones first: most runs reach the target by step
    30.
    """
    steps = [step for step in sorted(m.done_s) if step % 5 == 0]
    before = (m.started_s, 0.0)
    for part in (steps[:6], steps[6:]):
        lines = evaluated(m.folder, part, 4) if part else {}
        for step in part:
            here = (m.done_s[step], lines[step]["accuracy_sampled"])
            if here[1] >= TARGET:
                share = (TARGET - before[1]) / (here[1] - before[1])
                return before[0] + share * (here[0] - before[0]) - m.started_s
            before = here
    return float("inf")


def _memory(ours: Sequence[Measured]) -> Iterator[Case]:
    for role in sorted({role for m in ours for role in m.peak_mb}):
        peak = max(m.peak_mb.get(role, 0.0) for m in ours)
        yield alone(f"peak_memory_{role}", peak, "MB")


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"
