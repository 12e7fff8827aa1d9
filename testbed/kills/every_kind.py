"""A run of real processes under its supervisor, in which every process is killed once before and
once after each kind of write that it makes.

A run without kills gives the list of (process, kind); each of the following runs takes the next few
of them for every process, until none is left. An aim that its run did not reach, because the kills
before left less to write, is tried once more by itself. `python -m testbed.kills.every_kind
--process NAME --kind KIND --side after` is a run with one kill.
"""

import argparse
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollstream.producers.drafts.shared_memory import segment_folder
from testbed.kills.aims import Aim, AimFolder
from testbed.kills.final_counts import counted
from testbed.run_process import GROUPS, random_model, tiny

STEPS = 8
SMALL = [
    f"trainer.steps={STEPS}", "trainer.samples_per_group=2", "sampling.tokens_max=100",
    "rollouts.count=1", "rollouts.partial_tokens=4", "rollouts.slots=4", "checkpoints.every=2",
    "checkpoints.keep=1", "weights.versions_max=6", "trainer.lr=1e-6", "archive.roll_s=0.4",
    "relay.enabled=true", "relay.status_s=0.3", "scoring.count=1", "task.reward=late",
    "dispatch.keep_s=0.3", "rollouts.drafts=history", "rollouts.drafts_tokens=4096",
]  # fmt: skip
WAIT_S = 600.0
DEATHS = 3  # of a process in a run; a supervisor gives up after five in a minute
LATEST = 3
"""Of a kind that is written n times the n / 3rd write is aimed at: in the middle of the run, and
early enough that a run with fewer writes has it too.
"""


@dataclass
class Swept:
    """The findings; an aim that was `missed` was never reached, so it shows nothing."""

    kinds: int = 0
    killed: int = 0
    runs: int = 0
    missed: list[Aim] = field(default_factory=list[Aim])
    wrong: list[str] = field(default_factory=list[str])


def sweep(base: Path, every: int = 1) -> Swept:
    """Runs all kinds on both sides, or every so many of the runs; `base` is an empty folder."""
    model, found = random_model(base / "model"), Swept()
    calm = run_aimed(base / "calm", model, ())
    found.wrong += _wrong(base / "calm", calm)
    aims = aims_of(calm)
    found.kinds = len(aims) // 2
    for aimed in packs(aims, DEATHS)[::every]:
        sweep_one(base / f"run-{found.runs}", model, aimed, found)
    again, found.missed = [replace(aim, nth=1) for aim in found.missed], []
    for aimed in packs(again, 1):
        sweep_one(base / f"run-{found.runs}", model, aimed, found)
    return found


def aims_of(calm: AimFolder) -> list[Aim]:
    """Both sides of every kind of write that the processes of this run made."""
    return [
        Aim(process, kind, side, 1 + (count - 1) // LATEST)
        for process in calm.processes()
        for kind, count in sorted(calm.writes(process).items())
        for side in ("before", "after")
    ]


def packs(aims: Sequence[Aim], deaths: int) -> list[list[Aim]]:
    """Runs with every aim, no process more than `deaths` times in any run."""
    runs: list[list[Aim]] = []
    counts: Counter[str] = Counter()
    for aim in aims:
        number = counts[aim.process] // deaths
        counts[aim.process] += 1
        runs += [[]] * (number >= len(runs))
        runs[number] = [*runs[number], aim]
    return runs


def sweep_one(folder: Path, model: Path, aimed: Sequence[Aim], found: Swept) -> None:
    folder_of_aims = run_aimed(folder, model, aimed)
    fired = folder_of_aims.fired()
    missed = [aim for aim, happened in zip(aimed, fired, strict=True) if not happened]
    found.runs += 1
    found.killed += len(aimed) - len(missed)
    found.missed += missed
    for what in _wrong(folder, folder_of_aims):
        aims = "; ".join(str(aim) for aim in aimed)
        found.wrong.append(f"{what} (killed: {aims})")


def run_aimed(folder: Path, model: Path, aimed: Sequence[Aim]) -> AimFolder:
    """Runs to the end; the same command resumes the run where its supervisor was the victim."""
    folder.mkdir(parents=True)
    aims = AimFolder(folder / "aims")
    aims.aim(*aimed)
    give_up = time.monotonic() + WAIT_S
    with tiny(folder / "run", model, SMALL, aims) as run:
        for _ in range(1 + len(aimed)):
            supervisor = run.start()
            if supervisor.wait(None, give_up - time.monotonic()) >= 0:
                break
    return aims


def _wrong(folder: Path, aims: AimFolder) -> Iterator[str]:
    """The faults that the audit, the recount and the count of groups find."""
    if not (folder / "run" / "report.html").exists():
        logs = "".join(log.read_text()[-1000:] for log in sorted(folder.glob("run.run-*.log")))
        yield f"it did not end: {logs}"
        return
    found = counted(folder / "run", STEPS)
    yield from found.wrong
    if segment_folder("tiny", folder / "run", socket.gethostname()).exists():
        yield "the history of its drafts was left in memory"
    if found.trained != STEPS * GROUPS:
        yield f"{found.trained} groups trained, not {STEPS * GROUPS}"
    if not aims.processes():
        yield "nothing that was written was seen"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one kill again and say what was found.")
    parser.add_argument("--process", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--side", choices=("before", "after"), default="before")
    parser.add_argument("--nth", type=int, default=1)
    asked = parser.parse_args()
    aim, found = Aim(asked.process, asked.kind, asked.side, asked.nth), Swept()
    with tempfile.TemporaryDirectory(prefix="rollstream-kinds-") as scratch:
        model = random_model(Path(scratch) / "model")
        sweep_one(Path(scratch) / "run", model, [aim], found)
    print(*(found.wrong or ["nothing wrong"]), *(["it was never reached"] * len(found.missed)))
    return int(bool(found.wrong or found.missed))


if __name__ == "__main__":
    sys.exit(main())
