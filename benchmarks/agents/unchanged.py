"""Trains episodes of programs that were not written for a trainer, each in a run of its own, and
counts the programs whose run trained them all with a clean audit (`agents_unchanged`). A program
that does not send its history back as it was gets a branch, and its turns are trained all the same;
how many did is in the note.

`python -m benchmarks.agents.unchanged [PROGRAM…]` runs a few episodes of some programs. With
`--keep FOLDER` it runs all episodes and keeps runs and outcomes there: the same command resumes,
also in the middle of a run, so `--seconds` may cut it into slices.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks.agents.installing import EXAMPLES, ProgramMissing, programs
from benchmarks.case import Case, alone
from rollstream.deadline import Deadline
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.streams.records import Take, Trajectory
from testbed.repository import ROOT
from testbed.run_driver import HERE, Machine, RunDriver
from testbed.run_process import read
from testbed.servers import free_ports

CONFIGURATION = Path(__file__).with_name("unchanged.toml")
WITH_PROMPT = EXAMPLES / "with_prompt.py"
EPISODES, QUICK_EPISODES = 56, 8  # of a program
STEP_EPISODES = 8  # 2 groups of 4 samples
RUN_S = 600.0  # a run whose episodes all fail never ends by itself
GOAL = 8


def cases(quick: bool) -> Iterator[Case]:
    episodes = QUICK_EPISODES if quick else EPISODES
    yield _case({name: outcome(name, episodes) for name in programs()}, episodes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """States whether all episodes of a program were trained with a clean audit, and what came."""

    is_clean: bool
    text: str


def _case(found: Mapping[str, Outcome], episodes: int) -> Case:
    clean = sum(outcome.is_clean for outcome in found.values())
    details = "; ".join(f"{name}: {outcome.text}" for name, outcome in found.items())
    note = f"{episodes} episodes each; {details}"
    return alone("agents_unchanged", clean, "programs", at_least=GOAL, note=note)


def outcome(name: str, episodes: int) -> Outcome:
    """Runs the program's episodes in a new folder and audits the run."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _outcome(name, episodes, Path(folder), RUN_S)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"the run took longer than {RUN_S:g} s")


def _outcome(name: str, episodes: int, folder: Path, limit_s: float) -> Outcome:
    """Runs the program's episodes in this folder, or resumes its run there, and audits the run.
    Raises `TimeoutExpired` if it takes longer than `limit_s`.
    """
    try:
        program = programs()[name]()
    except ProgramMissing as error:
        return Outcome(False, f"missing: {error}")
    steps = f"trainer.steps={episodes // STEP_EPISODES}"
    if program.is_service:
        failure = _run_service(program.command, folder, steps, limit_s)
    else:
        whole = [sys.executable, str(WITH_PROMPT), *program.command]
        failure = _run(folder / "run", [steps, f"agent.command={json.dumps(whole)}"], limit_s)
    return Outcome(False, failure) if failure else _judged(folder / "run", episodes)


def _run_service(command: Sequence[str], folder: Path, steps: str, limit_s: float) -> str:
    """Runs with a program that opens its episodes itself; it has the run's tokenizer."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    TextTokenizer(None).whole.save_pretrained(str(folder / "tokenizer"))  # pyright: ignore[reportUnknownMemberType]
    service = subprocess.Popen(
        [*command, f"http://{address}", str(folder / "tokenizer")], start_new_session=True
    )
    try:
        settings = [steps, "agent.service=true", f"agent.endpoint={address}"]
        return _run(folder / "run", settings, limit_s)
    finally:
        os.killpg(service.pid, signal.SIGKILL)
        service.wait()


def _run(folder: Path, settings: Sequence[str], limit_s: float) -> str:
    """Runs to the last step; returns why it failed, or ""."""
    with RunDriver(folder, CONFIGURATION, settings, Machine(folder=ROOT)) as run:
        code = run.start().wait(None, limit_s)
        return run.newest().describe()[-500:] if code else ""


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
    audit = HERE.run("audit", str(folder), code=None)
    if audit.returncode:
        return Outcome(False, f"the audit ended with {audit.returncode}: {audit.stdout[-500:]}")
    return Outcome(True, f"clean, {len(turns)} turns, branches: {branches or 'none'}")


def resume(folder: Path, names: Sequence[str], seconds: float) -> None:
    """Runs all episodes of the programs that have no clean outcome in the folder yet, for at most
    about so many seconds, and prints each outcome, and the case once it is complete.
    """
    deadline, path = Deadline(seconds), folder / "outcomes.json"
    found = msgspec.json.decode(path.read_bytes(), type=dict[str, Outcome]) if path.exists() else {}
    for name in names or programs():
        if name not in found or not found[name].is_clean:
            own = folder / re.sub(r"[^a-z]+", "-", name.lower()).strip("-")
            own.mkdir(parents=True, exist_ok=True)
            try:
                found[name] = _outcome(name, EPISODES, own, max(1.0, deadline.remaining_s()))
            except subprocess.TimeoutExpired:
                print(f"{name}: not finished; the same command resumes it", flush=True)
                return
            path.write_bytes(msgspec.json.encode(found))
        print(name, found[name], flush=True)
    if found.keys() == programs().keys():
        print(json.dumps(asdict(_case(found, EPISODES))))


def _exit(number: int, frame: object) -> None:
    """End by an exception, so that a service of ours ends with us."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents.unchanged")
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help=f"of: {', '.join(programs())}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="resume all episodes there")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of a slice, with --keep")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit)
    if chosen.keep is not None:
        resume(chosen.keep, chosen.names, chosen.seconds)
        return
    for name in chosen.names or programs():
        print(name, outcome(name, QUICK_EPISODES), flush=True)


if __name__ == "__main__":
    main()
