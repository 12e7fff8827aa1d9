"""Runs of the quickstart's model whose processes are killed with -9 at chosen moments. Log and
files give the repeated steps and the time of the next new one.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.runs.quickstart import QUICKSTART
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import StepDone
from testbed.run_process import read, run_line, running

WAIT_S = 600.0
LOOK_S = 0.01
_T = TypeVar("_T")


@contextmanager
def quickstart(folder: Path, settings: Sequence[str]) -> Generator[subprocess.Popen[bytes]]:
    """Starts the run as a process; it is killed with its roles at the end of the block."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    line = run_line(QUICKSTART, folder, settings)
    with running(line, folder.parent / f"{folder.name}.log") as process:
        yield process


def role(process: subprocess.Popen[bytes], name: str) -> psutil.Process:
    """Waits for the living process of a role."""

    def found() -> psutil.Process | None:
        for child in psutil.Process(process.pid).children():
            try:
                if name in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    return until(found, process)


def until(look: Callable[[], _T | None], process: subprocess.Popen[bytes]) -> _T:
    """Returns the result of `look` as soon as it is not None."""
    give_up = time.monotonic() + WAIT_S
    while (found := look()) is None:
        if process.poll() not in (None, 0):
            raise RuntimeError(f"the run ended with {process.returncode}; see the log beside it")
        assert time.monotonic() < give_up, f"nothing came in {WAIT_S:g} s"
        time.sleep(LOOK_S)
    return found


def step_noted(folder: Path, step: int) -> Callable[[], int | None]:
    """Returns whether this step is done, by the trainer's own metrics file: opens neither log nor
    store.
    """
    path = folder / "metrics" / "trainer.jsonl"

    def look() -> int | None:
        last = max((int(line["step"]) for line in read_metrics(path)), default=0)
        return last if last >= step else None

    return look


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the trainer: the step from which it resumed, and how many it repeated."""

    resumed_from: int
    repeated: int


def attempts(folder: Path) -> list[Attempt]:
    """Parsed from the trainer's log."""
    found: list[Attempt] = []
    for line in (folder / "logs" / "trainer.log").read_text().splitlines():
        if "resumes after step" in line:
            words = line.split("resumes after step", 1)[1].replace(";", " ").split()
            found.append(Attempt(int(words[0]), int(words[words.index("has") + 1])))
    return found


def hashes(folder: Path) -> dict[int, list[str]]:
    """State hashes of each step in the ledger, archived or not: a repeated step with the same hash
    appears once.
    """
    found: dict[int, list[str]] = {}
    for done in read(folder, "ledger", StepDone):
        found.setdefault(done.step, []).append(done.state_hash)
    return found


def started_up(warm: Path) -> float:
    """Seconds of a process that does what a trainer does before it opens the run: imports, and
    loading the model.
    """
    code = (
        "import rollstream.__main__, rollstream.run.cli.role, rollstream.run.roles.train, "
        "rollstream.run.roles.roles; "
        "from rollstream.storage.starting_model.models import load_model; "
        f"load_model({str(warm)!r})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
    return time.monotonic() - began
