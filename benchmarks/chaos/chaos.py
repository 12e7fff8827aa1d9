"""What a run loses under `kill -9`: real processes killed at random and at each kind of write, one
process killed at every write, and thousands of seeded runs in memory
(docs/explanation/exactly-once.md).

`python -m benchmarks.chaos --seed S --kills N [--cloud] [--keep FOLDER] [--set a.b=c]` runs the
quickstart once under kills.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.chaos.run import chaos_run
from benchmarks.runs.quickstart import warm_model
from testbed.kills import every_kind
from testbed.stepped import batches, trials

KILLS, KILLS_QUICK = 25, 6
SEEDS, SEEDS_QUICK = (0, 1, 2), (0,)
STEPS, STEPS_QUICK = 60, 16
SEEDED, SEEDED_QUICK = 3000, 100
BOUNDARY_EVERY_QUICK = 60
KINDS_EVERY_QUICK = 8
FORMS = {"embedded": "SQLite and files", "cloud": "Kafka and S3"}


def cases(quick: bool) -> Iterator[Case]:
    """The goal of every case is 0."""
    logging.disable(logging.WARNING)  # every role logs errors about what was killed
    yield _boundaries(quick)
    yield _seeded(quick)
    yield _kinds(quick)
    for form in FORMS:
        yield from _processes(form, quick)


def _boundaries(quick: bool) -> Case:
    """A 20-step run in memory in which everything is killed before each write, and another in which
    it is killed after each.
    """
    writes = trials.at_boundary(-1).writes
    every = BOUNDARY_EVERY_QUICK if quick else 1
    tried = [
        trials.at_boundary(boundary, side)
        for boundary in range(0, writes, every)
        for side in ("before", "after")
    ]
    wrong = [trial for trial in tried if trial.found.wrong]
    note = f"{writes} write boundaries, {len(tried)} runs killed"
    return alone("boundary_violations", len(wrong), "runs", at_most=0, note=_first(note, wrong))


def _seeded(quick: bool) -> Case:
    """Runs each batch in a process of its own, so that memory left by crashes is freed with it."""
    count = SEEDED_QUICK if quick else SEEDED
    findings = batches.seeded_batches(count)
    happened = ", ".join(f"{n} {what}" for what, n in sorted(findings.happened.items()))
    note = f"{count} runs: {happened}"
    return alone(
        "seeded_violations",
        len(findings.wrong),
        "runs",
        at_most=0,
        note=_first(note, findings.wrong),
    )


def _kinds(quick: bool) -> Case:
    """Kills each real process before and after each kind of write that it makes."""
    with tempfile.TemporaryDirectory(prefix="rollstream-kinds-") as scratch:
        found = every_kind.sweep(Path(scratch), KINDS_EVERY_QUICK if quick else 1)
    missed = "; ".join(map(str, found.missed)) or "none"
    note = (
        f"{found.kinds} kinds of write by process, each before and after; {found.killed} kills in "
        f"{found.runs} runs, never reached: {missed}"
    )
    return alone(
        "kind_violations", len(found.wrong), "runs", at_most=0, note=_first(note, found.wrong)
    )


def _first(note: str, wrong: Sequence[object]) -> str:
    return f"{note}; first: {wrong[0]}" if wrong else note


def _processes(form: str, quick: bool) -> Iterator[Case]:
    kills = KILLS_QUICK if quick else KILLS
    steps = STEPS_QUICK if quick else STEPS
    lost = twice = 0
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollstream-chaos-") as scratch:
        base = Path(scratch)
        warm = warm_model(base)
        calm = chaos_run(base / f"{form}-calm", form, warm, 0, 0, steps)
        for seed in SEEDS_QUICK if quick else SEEDS:
            ended = chaos_run(base / f"{form}-{seed}", form, warm, seed, kills, steps)
            lost += ended.lost + abs(ended.trained - calm.trained)
            twice += ended.twice
            notes.append(f"seed {seed}: {ended}")
    note = f"{FORMS[form]}; without kills: {calm}; {'; '.join(notes)}"
    yield alone(f"chaos_lost_{form}", lost, "groups", at_most=0, note=note)
    yield alone(f"chaos_twice_{form}", twice, "trajectories", at_most=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """One run under kills; prints the counts as JSON and exits with 1 if anything was lost or done
    twice.
    """
    parser = argparse.ArgumentParser(description="Kill a run of the quickstart and count it again.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cloud", action="store_true", help="over Kafka and S3")
    parser.add_argument("--model", type=Path, help="a warm model's folder; default: make one")
    parser.add_argument("--keep", type=Path, help="a new folder that stays")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run (a.b=c)")
    asked = parser.parse_args(arguments)
    form = "cloud" if asked.cloud else "embedded"
    with tempfile.TemporaryDirectory(prefix="rollstream-chaos-") as scratch:
        warm = asked.model or warm_model(Path(scratch))
        folder = asked.keep or Path(scratch) / "run"
        kills, steps = asked.kills, asked.steps
        ended = chaos_run(folder, form, warm, asked.seed, kills, steps, asked.set)
    print(json.dumps(ended.as_json()))
    return int(bool(ended.lost or ended.twice))
