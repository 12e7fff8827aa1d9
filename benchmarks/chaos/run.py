"""One run of the quickstart whose processes are killed with -9, and the counts from its log.

The seed determines the pause before each kill, its victim (a role or, one time in eight, the
supervisor and all roles at once; the same command then resumes the run), and whether the kill is
aimed: an aimed victim dies just before or after the next write of a kind, during a checkpoint, a
version, the ledger, truncation or compaction, one time in four together with all others. The seed
does not determine how far the run is after a pause, so it gives the same kills at the same kinds of
moment, but not the same run.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runs.quickstart import QUICKSTART
from rollstream.errors import EXIT_REFUSED
from testbed.kills import aims, final_counts, moments
from testbed.run_driver import RunDriver, RunProcess
from testbed.waiting import let_pass

ROLES = ("trainer", "rollout-0", "rollout-1", "dispatch", "prompts", "archive")
ALL_ONE_IN = 8
AIMED_ONE_IN = 2
AIMED_ALL_ONE_IN = 4
AIM_S = 20.0  # seconds to wait for the aimed write; it may still come later
PAUSE_S = (1.0, 4.0)
WAIT_S = 1800.0


@dataclass
class Ended:
    """Counts of a finished run; `lost` sums missing groups and audit's violations."""

    trained: int
    expired: int
    dead: int
    lost: int
    twice: int
    seconds: float
    killed: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        kills = ", ".join(f"{name} {n}×" for name, n in sorted(self.killed.items())) or "none"
        wrong = f", wrong: {self.wrong[0]}" if self.wrong else ""
        return (
            f"{self.trained} trained, {self.expired} expired, {self.dead} dead in "
            f"{self.seconds:.0f} s (killed: {kills}){wrong}"
        )


def chaos_run(
    folder: Path,
    form: str,
    warm: Path,
    seed: int,
    kills: int,
    steps: int,
    overrides: Sequence[str] = (),
) -> Ended:
    """Runs to the end with `kills` kills, restarted where the supervisor died or gave up; 0 kills
    gives the run for comparison.
    """
    settings = [
        f"model.path={warm}", f"seed={seed}", f"trainer.steps={steps}", "checkpoints.every=5",
        "evaluation.enabled=false", "dispatch.heartbeat_timeout_s=3", "archive.roll_s=5",
        *_urls(form), *overrides,
    ]  # fmt: skip
    began = time.monotonic()
    strikes = _Strikes(
        random.Random(seed), aims.AimFolder(folder.parent / f"{folder.name}-aims"), form
    )
    module = "testbed.kills.aimed_role"
    with RunDriver(folder, QUICKSTART, settings, module=module, aim_folder=strikes.aims) as run:
        supervisor = run.start()
        while supervisor.process.poll() != 0:
            assert time.monotonic() - began < WAIT_S, f"{folder} is not done in {WAIT_S:g} s"
            if supervisor.is_over:  # it died, or a role died too often
                if supervisor.process.returncode == EXIT_REFUSED:
                    raise RuntimeError(f"the run was refused: {supervisor.describe()}")
                supervisor = run.start()
            left = kills - strikes.count()
            _sleep(supervisor, strikes.drawn.uniform(*PAUSE_S) if left > 0 else PAUSE_S[0])
            if left > 0 and not supervisor.is_over:
                strikes.strike(run)
    return _counted(folder, steps, strikes.killed(), time.monotonic() - began)


@dataclass
class _Strikes:
    """The actions that a seed determines, and those that were done."""

    drawn: random.Random
    aims: aims.AimFolder
    form: str
    at_random: Counter[str] = field(default_factory=Counter[str])
    moments: list[str] = field(default_factory=list[str])

    def count(self) -> int:
        return self.killed().total()

    def killed(self) -> Counter[str]:
        """Victims, and the moments of aimed kills that took place."""
        aimed = zip(self.moments, self.aims.fired(), strict=True)
        return self.at_random + Counter(moment for moment, fired in aimed if fired)

    def strike(self, run: RunDriver) -> None:
        if self.drawn.randrange(AIMED_ONE_IN) == 0:
            self._aim(run)
        elif name := _strike(run, self.drawn):
            self.at_random[name] += 1

    def _aim(self, run: RunDriver) -> None:
        """Aims at the next write of a drawn kind; returns when it was made, or after `AIM_S`
        seconds.
        """
        known = [
            m for m in moments.MOMENTS if self.form == "embedded" or m not in moments.EMBEDDED_ONLY
        ]
        moment = self.drawn.choice(known)
        victim, kind = self.drawn.choice(moments.MOMENTS[moment])
        side = self.drawn.choice(("before", "after"))
        everybody = self.drawn.randrange(AIMED_ALL_ONE_IN) == 0
        self.moments.append(f"{'all ' if everybody else ''}during {moment}")
        self.aims.aim(aims.Aim(victim, kind, side, nth=0, everybody=everybody))
        give_up = time.monotonic() + AIM_S
        while not (run.newest().is_over or time.monotonic() > give_up or self.aims.fired()[-1]):
            let_pass(0.05)


def _urls(form: str) -> list[str]:
    """Returns settings: the recount reads no bucket, so over Kafka nothing is truncated."""
    if form == "embedded":
        return []
    from testbed.servers import kafka_broker, versity

    return [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}", "truncate=false"]


def _sleep(supervisor: RunProcess, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not supervisor.is_over and time.monotonic() < until:
        let_pass(0.05)


def _strike(run: RunDriver, drawn: random.Random) -> str:
    """Returns the name of the killed process; "" if none of that name lives now."""
    if drawn.randrange(ALL_ONE_IN) == 0:
        run.newest().kill()
        return "all at once"
    name = drawn.choice(ROLES)
    victim = run.living(name)
    if victim is None:
        return ""
    with suppress(psutil.NoSuchProcess):
        victim.kill()
    return name


def _counted(folder: Path, steps: int, killed: Counter[str], seconds: float) -> Ended:
    """Counts by the audit and by an independent recount, which must agree."""
    found = final_counts.counted(folder, steps)
    return Ended(
        found.trained,
        found.expired,
        found.dead,
        found.lost,
        found.twice,
        round(seconds, 1),
        killed,
        found.wrong,
    )
