"""Whole runs under a plan of crashes, each with its findings; the medium is a real SQLite bus and
files, or memory.

`python -m testbed.stepped.trials --seed S` repeats one seeded trial, `--boundary N --side after`
one boundary of the fixed run.
"""

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.baton import Baton
from testbed.stepped.crashes import AllAtOnce, Drawn, Plan, Rates, Side
from testbed.stepped.findings import Findings, findings
from testbed.stepped.run import Medium, Shape, SteppedRun

TWENTY = Shape(20, 2, 2, checkpoint_every=3)
BOUNDARY_SEED = 7


@dataclass
class Trial:
    """The crashes of a run and its findings; `again` is the command that repeats it."""

    again: str
    found: Findings
    happened: Counter[str] = field(default_factory=Counter[str])
    writes: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        wrong = "; ".join(self.found.wrong) or "nothing wrong"
        return f"{wrong} ({dict(self.happened)}); again: {self.again}"


def at_boundary(boundary: int, side: Side = "before") -> Trial:
    """The 20-step run over SQLite and files, with everything killed at one side of this write; −1
    kills nothing and counts.
    """
    with scratch_folder() as folder:
        baton = Baton(BOUNDARY_SEED)

        def reopen() -> Medium:
            bus = open_bus(f"sqlite:{folder / 'bus'}", baton.clock)
            return bus, open_store(f"file:{folder / 'store'}")

        run = SteppedRun(reopen, folder, baton, TWENTY)
        plan = run.plan = AllAtOnce(baton, run.alive)
        plan.at, plan.side = boundary, side
        again = f"python -m testbed.stepped.trials --boundary {boundary} --side {side}"
        trial = tried(run, again, plan)
        if plan.killed:
            trial.happened[f"all killed {side} {plan.killed}"] += 1
        elif boundary >= 0:
            trial.found.wrong.append("this boundary was never reached")
        run.bus.close()
        return trial


def seeded(seed: int, restless: bool = False, calm: bool = False) -> Trial:
    """A short run in memory with order, kills and freezes drawn from the seed; `restless` moves
    trajectories between rollouts all the time, `calm` kills and freezes nothing.
    """
    with scratch_folder() as folder:
        baton = Baton(seed)
        medium = (MemoryBus(baton.clock), MemoryStore())
        drawn = baton.random
        shape = Shape(
            steps=drawn.randint(3, 6),
            groups=drawn.randint(1, 3),
            samples=drawn.randint(2, 3),
            checkpoint_every=drawn.randint(1, 3),
            keep_version=drawn.random() < 0.3,
            restless=restless,
            drafts=random.Random(f"drafts {seed}").random() < 0.3,  # other draws stay as they were
        )
        run = SteppedRun(lambda: medium, folder, baton, shape)
        rates = Rates(kill=0.02, freeze=0.01, all_at_once=0.004)
        plan = run.plan = Drawn(baton, run.alive, rates, most=0 if calm else 8)
        flags = " --restless" * restless + " --calm" * calm
        again = f"python -m testbed.stepped.trials --seed {seed}{flags}"
        trial = tried(run, again, plan)
        trial.happened += plan.happened + run.asked
        return trial


def tried(run: SteppedRun, again: str, plan: Plan) -> Trial:
    try:
        run.run()
        found = findings(run.bus, run.store, run.shape)
    except Exception as error:  # noqa: BLE001  a role's failure is a finding, with its seed
        found = Findings([f"{type(error).__name__}: {error}"])
    return Trial(again, found, writes=plan.writes, kinds=plan.kinds)


@contextmanager
def scratch_folder() -> Generator[Path]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollstream-chaos-") as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one trial again and say what was found.")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--restless", action="store_true")
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--boundary", type=int, default=-1)
    parser.add_argument("--side", choices=("before", "after"), default="before")
    asked = parser.parse_args()
    trial = (
        seeded(asked.seed, asked.restless, asked.calm)
        if asked.seed is not None
        else at_boundary(asked.boundary, asked.side)
    )
    print(trial)
    print(f"{trial.writes} writes, {trial.found.trained} groups trained")
    raise SystemExit(bool(trial.found.wrong))


if __name__ == "__main__":
    main()
