"""One run of the quickstart while its processes are killed with -9, and what its log says then.

Victim and moment of each kill follow from the seed: somewhere within a step, of a role or, one time
in eight, of the supervisor and all roles at once; the same command starts the run again.
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pipeline import QUICKSTART
from rollstream.restarts import EXIT_REFUSED
from tests.recount import places_of, recount

ROLES = ("trainer", "rollout-0", "rollout-1", "dispatch", "prompts", "archive")
ALL_ONE_IN = 8
PAUSE_S = (1.0, 4.0)
WAIT_S = 1800.0


@dataclass
class Ended:
    """Counts of a run that is over; `lost` sums what is missing and what the audit holds against
    it.
    """

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


def chaos_run(folder: Path, form: str, warm: Path, seed: int, kills: int, steps: int) -> Ended:
    """The run to its end, killed `kills` times on the way, started again where its supervisor died
    or gave up; 0 kills is the run that it is compared with.
    """
    settings = [
        f"model.path={warm}", f"seed={seed}", f"trainer.steps={steps}", "checkpoints.every=5",
        "evaluation.enabled=false", "dispatch.heartbeat_timeout_s=3", "archive.roll_s=5",
        *_urls(form),
    ]  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    drawn, killed, began = random.Random(seed), Counter[str](), time.monotonic()
    process = _start(folder, settings)
    try:
        while process.poll() != 0:
            assert time.monotonic() - began < WAIT_S, f"{folder} is not done in {WAIT_S:g} s"
            if process.poll() is not None:  # its supervisor died, or a role died too often
                _check_refused(process.returncode, folder)
                process = _start(folder, settings)
            left = kills - killed.total()
            _sleep(process, drawn.uniform(*PAUSE_S) if left else PAUSE_S[0])
            if left and process.poll() is None:
                killed[_strike(process, drawn)] += 1
                killed.pop("", None)
    finally:
        _end(process)
    return _counted(folder, steps, killed, time.monotonic() - began)


def _check_refused(code: int, folder: Path) -> None:
    """A configuration that is wrong stays wrong: starting it again would go on for ever."""
    if code == EXIT_REFUSED:
        log = (folder.parent / f"{folder.name}.log").read_text()
        raise RuntimeError(f"the run was refused: {log[-1000:]}")


def _urls(form: str) -> list[str]:
    """The recount reads no bucket, so over Kafka nothing is truncated."""
    if form == "embedded":
        return []
    from tests.servers import kafka_broker, versity

    return [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}", "truncate=false"]


def _start(folder: Path, settings: Sequence[str]) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "rollstream", "run", str(QUICKSTART), "--run", str(folder)]
    for setting in settings:
        line += ["--set", setting]
    with (folder.parent / f"{folder.name}.log").open("ab") as output:
        return subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT)


def _sleep(process: subprocess.Popen[bytes], seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)


def _strike(process: subprocess.Popen[bytes], drawn: random.Random) -> str:
    """Who was killed; "" if nobody of that name lives now."""
    if drawn.randrange(ALL_ONE_IN) == 0:
        _end(process)
        return "all at once"
    name = drawn.choice(ROLES)
    for child in psutil.Process(process.pid).children():
        try:
            if name in child.cmdline():
                child.kill()
                return name
        except psutil.NoSuchProcess:
            continue
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """The supervisor by its id; its roles go with it, and none is left when this returns."""
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(30)
        psutil.wait_procs(children, timeout=30)


def _counted(folder: Path, steps: int, killed: Counter[str], seconds: float) -> Ended:
    """By the audit and by the recount, which must say the same."""
    line = [sys.executable, "-m", "rollstream", "audit", str(folder), "--json"]
    said = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    if not said.stdout:
        raise RuntimeError(f"rollstream audit {folder} ended with {said.returncode}: {said.stderr}")
    report = json.loads(said.stdout)
    counted = recount(places_of(str(folder)))
    groups, trajectories = counted["groups"], counted["trajectories"]
    audited = {line["invariant"]: line["counts"] for line in report["invariants"]}[1]
    lost = trajectories["not_found"] + groups["never_admitted"] + counted["gaps"]
    lost += report["violations"] + (audited["trained"] != groups["trained"])
    lost += steps - counted["steps"]
    wrong = [
        f"{offender['what']}" for line in report["invariants"] for offender in line["offenders"]
    ]
    twice = trajectories["trained_twice"] + groups["ended_twice"] + trajectories["not_the_first"]
    return Ended(
        groups["trained"],
        groups["expired"],
        groups["dead"],
        lost,
        twice,
        round(seconds, 1),
        killed,
        wrong,
    )
