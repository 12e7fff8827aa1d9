"""The cost of a kill: whether repeated steps are the same to the bit, how soon the next new step is
done, and how much work is repeated (docs/explanation/exactly-once.md).

Real processes of the quickstart with its model are killed with -9. Recovery is compared with a
process that only starts (imports and model), measured beside the same run with its trainer stopped,
so that both have the same share of the machine.
"""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.resume import promise
from benchmarks.resume.lost_tokens import Lost, tokens_lost
from benchmarks.runs.killed import attempts, hashes, started_up
from benchmarks.runs.quickstart import QUICKSTART, warm_model
from rollstream.run.supervisor.supervisor import SupervisorLimits
from rollstream.storage.metrics_file import read_metrics
from testbed.run_driver import RunDriver

EVERY = 5
SEEDS, SEEDS_QUICK = (0, 1, 2), (0,)
KILLS, KILLS_QUICK = (4, 9, 13), (3, 8)  # after these steps: the next checkpoint does not exist yet
BEYOND = 3  # steps after the last kill
RECOVERIES, RECOVERIES_QUICK = (7, 13, 19), (7,)
SETTINGS = (
    f"checkpoints.every={EVERY}", "evaluation.enabled=false", "archive.enabled=false",
    "truncate=false",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds: from the kill to the next new step, of the repeated steps and that one, and of a
    process that only starts.
    """

    whole_s: float
    steps_s: float
    start_s: float

    @property
    def ratio(self) -> float:
        return (self.whole_s - self.steps_s) / self.start_s


def cases(quick: bool) -> Iterator[Case]:
    """Yields `resume_identical` and `recovery_time`, with repeated and lost work in their notes;
    then the cost without kills.
    """
    with tempfile.TemporaryDirectory(prefix="rollstream-resume-") as scratch:
        base = Path(scratch)
        warm = warm_model(base)
        yield _identical(base, warm, quick)
        yield _recovery(base, warm, RECOVERIES_QUICK if quick else RECOVERIES)
    yield from promise.cases(quick)


def _settings(warm: Path, seed: int, steps: int) -> list[str]:
    return [*SETTINGS, f"model.path={warm}", f"seed={seed}", f"trainer.steps={steps}"]


def _identical(base: Path, warm: Path, quick: bool) -> Case:
    repeated = differing = 0
    most = 0
    kills = KILLS_QUICK if quick else KILLS
    for seed in SEEDS_QUICK if quick else SEEDS:
        folder = base / f"killed-{seed}"
        again = _killed(folder, _settings(warm, seed, kills[-1] + BEYOND), kills)
        found = hashes(folder)
        repeated += sum(len(steps) for steps in again)
        differing += sum(len(set(found[step])) > 1 for steps in again for step in steps)
        most = max(most, *(len(steps) for steps in again))
    note = (
        f"{repeated} steps done again after {len(SEEDS_QUICK if quick else SEEDS)} × {len(kills)} "
        f"kills of the trainer; work repeated after one: at most {most} steps "
        f"(a checkpoint every {EVERY})"
    )
    value = 1 - differing / repeated if repeated else 0.0
    return alone("resume_identical", value, "share", at_least=1.0, note=note)


def _killed(folder: Path, settings: Sequence[str], kills: Sequence[int]) -> list[range]:
    """Runs to the end; returns the steps that each restarted trainer repeated."""
    done: list[int] = []
    with RunDriver(folder, QUICKSTART, settings) as run:
        run.start()
        for step in kills:
            run.wait_for_step(step)
            run.role("trainer").kill()
            done.append(max(hashes(folder)))
            before = len(done)
            run.wait_for(lambda: len(attempts(folder)) > before)  # noqa: B023
        run.wait_complete()
    starts = attempts(folder)[1:]
    return [range(one.resumed_from + 1, last + 1) for one, last in zip(starts, done, strict=True)]


def _recovery(base: Path, warm: Path, kills: Sequence[int]) -> Case:
    folder = base / "recovered"
    settings = _settings(warm, 0, kills[-1] + 20)
    with RunDriver(folder, QUICKSTART, settings) as run:
        run.start()
        run.wait_for_step(2)
        lost = tokens_lost(folder, run.role("rollout-0"))
        found = [_recovered(run, warm, step) for step in kills]
        gone_s = _machine_gone(run)
    value = statistics.median(one.whole_s - one.steps_s for one in found)
    start = statistics.median(one.start_s for one in found)
    ratio = statistics.median(one.ratio for one in found)
    note = _note(found, lost, gone_s)
    met = ratio <= 1.5
    return Case("recovery_time", value, "s", "process start-up", start, ratio, 1.5, met, note)


def _recovered(run: RunDriver, warm: Path, step: int) -> Recovery:
    """The trainer is stopped while another process starts beside it, then killed."""
    folder = run.folder
    run.wait_for_step(step)
    trainer = run.role("trainer")
    trainer.send_signal(signal.SIGSTOP)
    start_s = started_up(warm)
    done = max(hashes(folder))
    count = len(attempts(folder))
    trainer.kill()
    began = time.monotonic()
    run.wait_for_step(done + 1)
    whole_s = time.monotonic() - began
    lines = {int(line["step"]): line for line in read_metrics(folder / "metrics/trainer.jsonl")}
    again = range(attempts(folder)[count].resumed_from + 1, done + 1)
    steps_s = sum(lines[one]["seconds"] - lines[one]["wait_s"] for one in again)
    usual = statistics.median(line["seconds"] for line in lines.values())
    return Recovery(whole_s, steps_s + usual, start_s)


def _machine_gone(run: RunDriver) -> float:
    """Everything is killed, and the restarted roles have no nonce: the leases must expire. Seconds
    from the start to the next new step.
    """
    run.newest().kill()
    os.remove(run.folder / "nonces.json")
    done = max(hashes(run.folder))
    began = time.monotonic()
    run.start()
    run.wait_for_step(done + 1)
    return time.monotonic() - began


def _note(found: Sequence[Recovery], lost: Lost, gone_s: float) -> str:
    starts = [one.start_s for one in found]
    ratios = ", ".join(f"{one.ratio:.2f}" for one in found)
    return (
        f"ratios {ratios}; start-up alone {min(starts):.1f} to {max(starts):.1f} s (imports and "
        f"model); whole machine gone, leases run out: next step {gone_s:.1f} s after the start; "
        f"supervisor looks every {SupervisorLimits().tick_s:g} s; {lost}"
    )
