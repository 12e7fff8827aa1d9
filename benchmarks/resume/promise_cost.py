"""The cost of the promise: the share of a run's CPU time that ledger, partials and checkpoints
take, at 320 generated tokens a trajectory.

It is counted in the processes of real runs (`traced/sitecustomize.py`: CPU time of the calling
thread around the functions named there): encoding and appending the ledger's records, hashing
masters and optimiser for `StepDone`; copying, encoding and writing checkpoints and removing old
ones; making and publishing partials. It does not count reading the ledger or partials (dispatch,
archive), the trajectories themselves and versions of weights, which any such system writes;
SQLite's work in the kernel is included, the disk's is not.

The whole is the CPU time of trainer and rollouts from the first such call to their end; imports,
warm-up and all other roles are excluded, which only makes the share larger. Each of the runs is
paired with one that writes no partials and only its first and last checkpoint; the difference of
CPU time per trained token is noted. It includes effects that counting misses (caches, waiting for
locks) and the noise of two runs on two cores.
"""

import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.runs.measured import run
from benchmarks.runs.quickstart import QUICKSTART
from testbed.repository import ROOT

PAIRS, PAIRS_QUICK = 7, 1
STEPS, STEPS_QUICK = 6, 3
COST_MAX = 0.05
SHAPE = (
    "task.name=benchmarks.resume.promise_task:Parity",
    "sampling.tokens_max=320",
    "warmup.steps=1",
    "warmup.documents=64",
    "checkpoints.every=2",
    "evaluation.enabled=false",
    "archive.enabled=false",
    "trainer.groups_per_step=8",
    "trainer.lr=1e-5",
    "rollouts.slots=64",
)
WITHOUT = ("rollouts.partial_tokens=1000000", "rollouts.partial_s=100000", "checkpoints.every=1000")


@dataclass(frozen=True, slots=True)
class Counted:
    """CPU seconds of one run: the total, and by section; `tokens` it trained."""

    process_s: float
    sections_s: Counter[str]
    tokens: float

    @property
    def share(self) -> float:
        return self.sections_s.total() / self.process_s


def cases(quick: bool) -> Iterator[Case]:
    """The median share, its parts, and the paired difference."""
    steps = STEPS_QUICK if quick else STEPS
    with_it: list[Counted] = []
    without: list[Counted] = []
    with tempfile.TemporaryDirectory(prefix="rollstream-cost-") as scratch:
        for pair in range(PAIRS_QUICK if quick else PAIRS):
            sides = [(with_it, ()), (without, WITHOUT)]
            for index, (found, extra) in enumerate(sides if pair % 2 else sides[::-1]):
                folder = Path(scratch) / f"{pair}-{index}"
                found.append(_run(folder, [f"trainer.steps={steps}", f"seed={pair}", *extra]))
    yield _case(with_it, without)


def _case(with_it: Sequence[Counted], without: Sequence[Counted]) -> Case:
    shares = [one.share for one in with_it]
    names = sorted({name for one in with_it for name in one.sections_s})
    parts = ", ".join(
        f"{name} {statistics.median(o.sections_s[name] / o.process_s for o in with_it):.4f}"
        for name in names
    )
    paired = [
        1 - (there.process_s / there.tokens) / (here.process_s / here.tokens)
        for here, there in zip(with_it, without, strict=True)
    ]
    note = (
        f"of CPU time, {parts}; {min(shares):.4f} to {max(shares):.4f} in {len(shares)} runs; "
        f"paired difference {statistics.median(paired):.3f} ({min(paired):.3f} to "
        f"{max(paired):.3f})"
    )
    return alone("promise_cost", statistics.median(shares), "share", at_most=COST_MAX, note=note)


def _run(folder: Path, overrides: Sequence[str]) -> Counted:
    """Runs once to the end; a run that fails raises with its output."""
    traced = folder.with_suffix(".traced")
    traced.mkdir(parents=True)
    path = os.pathsep.join([str(Path(__file__).parent / "traced"), str(ROOT)])
    given = {"PYTHONPATH": path, "CPU_COUNTED_IN": str(traced)}
    measured = run(QUICKSTART, folder, [*SHAPE, *overrides], given)
    lines = [json.loads(one.read_text()) for one in traced.glob("*.json")]
    sections: Counter[str] = Counter()
    for line in lines:
        sections.update(line["sections_s"])
    assert set(sections) == {"ledger", "partials", "checkpoint"} or WITHOUT[0] in overrides, lines
    return Counted(sum(line["process_s"] for line in lines), sections, measured.tokens)
