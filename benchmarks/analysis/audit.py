"""The share of planted violations that audit finds, and its findings in healthy runs
(docs/reference/audit.md).

`audit_found` plants every kind of violation of `testbed/violations/harness.py` into a copy of a
healthy run. Several seeds per kind draw which bit, token or index changes. The value is the share
of kinds that audit finds and names; kinds that a log cannot show count as missed and are printed.
`audit_false` audits seeded runs in memory, most of them with kills and freezes, and counts the runs
in which audit reports a violation or something that it could not check.
"""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.stepped import batches, trials
from testbed.violations import harness, healthy_run

SEEDS, SEEDS_QUICK = 3, 1
KILLED, KILLED_QUICK = 150, 15
CALM, CALM_QUICK = 50, 5
FOUND_GOAL = 0.95


def cases(quick: bool) -> Iterator[Case]:
    """Yields the share found, then the false findings."""
    logging.disable(logging.WARNING)  # roles of a killed run log an error about what was killed
    yield _found(SEEDS_QUICK if quick else SEEDS)
    yield _false(KILLED_QUICK if quick else KILLED, CALM_QUICK if quick else CALM)


def _found(seeds: int) -> Case:
    with tempfile.TemporaryDirectory(prefix="rollstream-audit-") as scratch:
        healthy = healthy_run.make_run(Path(scratch) / "healthy")
        wrong: list[str] = []
        count = 0
        for kind in harness.kinds():
            count += 1
            found = (harness.missed(kind, healthy, Path(scratch), seed) for seed in range(seeds))
            wrong += [why for why in found if why][:1]
        hidden = [f"{name} ({why})" for name, why, _ in harness.unseen(healthy, Path(scratch))]
    share = (count - len(wrong)) / (count + len(hidden))
    note = f"{count + len(hidden)} kinds, {seeds} seeds each; no log shows: {'; '.join(hidden)}"
    if wrong:
        note = f"{note}; missed: {'; '.join(wrong)}"
    return alone("audit_found", share, "of kinds", at_least=FOUND_GOAL, note=note)


def _false(killed: int, calm: int) -> Case:
    told = batches.seeded_batches(killed)
    quiet = (trials.seeded(seed, calm=True) for seed in range(calm))
    wrong = [*told.wrong, *(str(trial) for trial in quiet if trial.found.wrong)]
    happened = ", ".join(f"{n} {what}" for what, n in sorted(told.happened.items()))
    note = f"{killed + calm} runs: {happened}"
    if wrong:
        note = f"{note}; first: {wrong[0]}"
    return alone("audit_false", len(wrong), "runs", at_most=0, note=note)
