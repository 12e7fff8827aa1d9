"""Runs of the quickstart's model whose processes are killed with -9 at chosen moments. Log and
files give the repeated steps and the time of the next new one.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rollstream.streams.records import StepDone
from testbed.run_process import read


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
