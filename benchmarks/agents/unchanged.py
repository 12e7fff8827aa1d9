"""Trains episodes of programs that were not written for a trainer, each in a run of its own, and
counts the programs whose run trained them all with a clean audit (`agents_unchanged`). A program
that does not send its history back as it was gets a branch, and its turns are trained all the same;
how many did is in the note.
`python -m benchmarks.agents.unchanged [PROGRAM…]` runs some of them by name.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agents.installing import EXAMPLES, ProgramMissing, programs
from benchmarks.case import Case, alone
from rollstream.producers.tasks.text_tokenizer import TextTokenizer
from rollstream.streams.records import Take, Trajectory
from testbed.repository import ROOT
from testbed.run_process import read, run_line

CONFIGURATION = Path(__file__).with_name("unchanged.toml")
WITH_PROMPT = EXAMPLES / "with_prompt.py"
EPISODES, QUICK_EPISODES = 56, 8  # of a program
STEP_EPISODES = 8  # 2 groups of 4 samples
RUN_S = 600.0  # a run whose episodes all fail never ends by itself
GOAL = 8


def cases(quick: bool) -> Iterator[Case]:
    episodes = QUICK_EPISODES if quick else EPISODES
    found = {name: outcome(name, episodes) for name in programs()}
    clean = sum(outcome.is_clean for outcome in found.values())
    details = "; ".join(f"{name}: {outcome.text}" for name, outcome in found.items())
    note = f"{episodes} episodes each; {details}"
    yield alone("agents_unchanged", clean, "programs", at_least=GOAL, note=note)


@dataclass(frozen=True, slots=True)
class Outcome:
    """States whether all episodes of a program were trained with a clean audit, and what came."""

    is_clean: bool
    text: str


def outcome(name: str, episodes: int) -> Outcome:
    """Runs the program's episodes and audits the run."""
    try:
        program = programs()[name]()
    except ProgramMissing as error:
        return Outcome(False, f"missing: {error}")
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "run"
        steps = f"trainer.steps={episodes // STEP_EPISODES}"
        try:
            if program.is_service:
                failure = _run_service(program.command, Path(folder), steps)
            else:
                whole = [sys.executable, str(WITH_PROMPT), *program.command]
                failure = _run(run_folder, [steps, f"agent.command={json.dumps(whole)}"])
        except subprocess.TimeoutExpired:
            failure = f"the run took longer than {RUN_S:g} s"
        return Outcome(False, failure) if failure else _judged(run_folder, episodes)


def _run_service(command: Sequence[str], folder: Path, steps: str) -> str:
    """Runs with a program that opens its episodes itself; it has the run's tokenizer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    TextTokenizer(None).whole.save_pretrained(str(folder / "tokenizer"))  # pyright: ignore[reportUnknownMemberType]
    service = subprocess.Popen(
        [*command, f"http://{address}", str(folder / "tokenizer")], start_new_session=True
    )
    try:
        return _run(folder / "run", [steps, "agent.service=true", f"agent.endpoint={address}"])
    finally:
        os.killpg(service.pid, signal.SIGKILL)
        service.wait()


def _run(folder: Path, settings: Sequence[str]) -> str:
    """Runs to the last step; returns why it failed, or ""."""
    run = subprocess.run(
        run_line(CONFIGURATION, folder, settings), cwd=ROOT, capture_output=True, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    return f"the run ended with {run.returncode}: {run.stderr[-500:]}" if run.returncode else ""


def _judged(folder: Path, episodes: int) -> Outcome:
    """Judges a program by the log of its run."""
    takes = read(folder, "ledger", Take)
    trained = {member.trajectory for take in takes for member in take.members}
    if len(trained) < episodes:
        return Outcome(False, f"{len(trained)} of {episodes} episodes trained")
    records = read(folder, "trajectories", Trajectory)
    turns = [turn for record in records for turn in record.turns]
    causes = Counter(turn.fork for turn in turns if turn.fork)
    branches = ", ".join(f"{number} by {cause}" for cause, number in causes.items())
    audit = subprocess.run(
        [sys.executable, "-m", "rollstream", "audit", str(folder)], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if audit.returncode:
        return Outcome(False, f"the audit ended with {audit.returncode}: {audit.stdout[-500:]}")
    return Outcome(True, f"clean, {len(turns)} turns, branches: {branches or 'none'}")


if __name__ == "__main__":
    for program in sys.argv[1:] or programs():
        print(program, outcome(program, QUICK_EPISODES), flush=True)
