"""Kills first processes of random containers while a run trains, broker and object store too, and
counts what was lost, trained twice or trained to another hash (`stack_kills`).

A kill waits until the container is started again. Each run has to end. Then the audit must find
every invariant kept, in a container and from outside, and a replay of all its steps in a container
without kills must end with the hash of every step that the ledger has.

Each piece is a run of minutes, and its result is kept in a folder of the system's temporary ones
until all are measured: an interrupted benchmark resumes. `python -m benchmarks.stack.kills 1`
measures the next piece.
"""

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.kept import kept, kept_folder
from testbed.stack.compose import ROLES, SERVERS, Stack, wait_until
from testbed.stack.daemon import StackDaemon
from testbed.stack.images import built_daemon
from testbed.stack.whole_run import StackRun, audit_outside

SEEDS, KILLS, QUICK_KILLS = 2, (13, 12), 6
BOUND_S = 3600.0
STEPS_PER_KILL = 8
"""So many are trained between two kills at most, so the run is not complete before the last."""
SETTINGS = {
    "TRAINER__GROUPS_PER_STEP": "8",
    "CHECKPOINTS__EVERY": "5",
    "WARMUP__STEPS": "60",
    "WARMUP__DOCUMENTS": "1000",
    "EVALUATION__EVERY": "20",
    "EVALUATION__PROMPTS": "40",
}
"""The quickstart, shortened: what counts is how many writes a kill may hit."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One run that loses `kills` processes."""

    seed: int
    kills: int

    @property
    def name(self) -> str:
        return f"{self.seed:03d}-{self.kills}.json"


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """What one run lost, and its violations and unequal hashes in words."""

    kills: dict[str, int]
    steps: int
    wrong: list[str] = field(default_factory=list[str])


def pieces(quick: bool) -> list[Piece]:
    """Returns all pieces; each has a seed of its own."""
    if quick:
        return [Piece(0, QUICK_KILLS)]
    return [
        Piece(10 * seed + number, kills)
        for seed in range(SEEDS)
        for number, kills in enumerate(KILLS)
    ]


def measured(daemon: StackDaemon, piece: Piece, folder: Path) -> PieceCounts:
    """Returns the counts of a piece: those that are kept, or new ones, which are kept then."""
    return PieceCounts(**kept(folder / piece.name, lambda: asdict(_measure(daemon, piece))))


def _measure(daemon: StackDaemon, piece: Piece) -> PieceCounts:
    steps = piece.kills * STEPS_PER_KILL
    settings = {**SETTINGS, "SEED": str(piece.seed), "TRAINER__STEPS": str(steps)}
    stack = Stack(daemon, settings)
    stack.down(with_data=True)
    killed, wrong = Counter[str](), list[str]()
    with StackRun(stack) as run:
        stack.up()
        wait_until(stack, (*ROLES, *SERVERS), "healthy", BOUND_S)
        run.wait_for_step(1)
        _kill_at_random(run, random.Random(piece.seed), piece.kills, killed)
        wait_until(stack, ROLES, "ended", BOUND_S)
        run.wait_for_report()
        with tempfile.TemporaryDirectory() as folder:
            checks = (
                run.audit,
                lambda: audit_outside(stack, Path(folder)),
                lambda: run.replay(BOUND_S),
            )
            for check in checks:
                try:
                    check()
                except (AssertionError, RuntimeError) as failure:
                    wrong.append(str(failure))
    return PieceCounts(dict(killed), steps, wrong)


def _kill_at_random(run: StackRun, choose: random.Random, kills: int, killed: Counter[str]) -> None:
    for _ in range(kills):
        if run.step() == sys.maxsize:
            return  # the run is complete; the note counts the kills before
        running = [one for one in run.stack.containers() if one.status == "running"]
        service = choose.choice(running).service
        run.kill(service)
        killed[service] += 1
        time.sleep(choose.uniform(0.0, 5.0))


def cases(daemon: StackDaemon, quick: bool) -> Iterator[Case]:
    """25 kills with each of two seeds; quick: six with one."""
    folder = kept_folder("stack-kills", quick)
    found = [measured(daemon, piece, folder) for piece in pieces(quick)]
    killed: Counter[str] = Counter()
    for one in found:
        killed.update(one.kills)
    wrong = [text for one in found for text in one.wrong]
    note = ", ".join(f"{name} {count}" for name, count in sorted(killed.items()))
    text = "; ".join([f"{killed.total()} killed: {note}", *(text[:300] for text in wrong)])
    yield alone("stack_kills", len(wrong), "lost + twice", at_most=0, note=text)
    shutil.rmtree(folder)


def main(most: int) -> None:
    """Measure the next pieces, at most this many, and print all that are kept."""
    folder = kept_folder("stack-kills", quick=False)
    missing = [piece for piece in pieces(quick=False) if not (folder / piece.name).exists()]
    with built_daemon() as daemon:
        for piece in missing[:most]:
            print(piece.name, measured(daemon, piece, folder), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS * len(KILLS))
