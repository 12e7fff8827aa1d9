"""What grows in a run of months (`soak_memory`, `soak_files`, `soak_disk`; `soak_minutes` is how
long the steps took): 20 000 steps of 2 groups × 4 samples under the paced engine and learner, whose
time passes 10 000 times as fast.

All else is real: supervisor, prompts, dispatch, trainer, relay, rollouts and archive are processes
over SQLite and files; a second relay stands beside the first, rollouts of new names come, and leave
by a signal or by `kill -9`, and the run is audited again and again. A value is the median of the
last quarter of the steps over that of the second quarter: a bounded quantity stays at 1, a
growing one reaches 2.3. The last audit must find nothing.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.case import Case, alone
from benchmarks.soak.samples import MEASURES, Samples, lines
from rollstream.streams.sqlite.database import WAL_BYTES
from rollstream.streams.topics import catalogue
from testbed.run_driver import RunDriver, RunFailed, RunProcess
from testbed.waiting import let_pass

STEPS, STEPS_QUICK = 20_000, 2_000
VISITS, AUDITS = 40, 8
LOOK_S = 1.0
START_S, SILENT_S = 120.0, 120.0
GROWTH_MAX = 1.1
MINUTES_MAX = 25.0
AUDIT_S = 1800.0
VERSIONS_MAX, VERSION_BYTES = 16, 20_000
ARCHIVED_BYTES = 200  # of a trajectory without its tokens, with its share of ledger and admissions
TABLE = """
run = "soak"
task = { name = "numbered", options = { prompts = 1000, prompt_tokens = 16 } }
sampling = { tokens_max = 64 }
rollouts = { engine = "paced", count = 2, slots = 16, context_max = 128 }
relay = { enabled = true }
checkpoints = { every = 50 }
archive = { roll_s = 5.0 }
evaluation = { enabled = false }
[trainer]
learner = "paced"
groups_per_step = 2
samples_per_group = 4
[paced]
time_scale = 10000.0
weights_bytes = 20_000
train_step_s = 0.0
train_token_s = 0.0
lengths = { median = 32, p99 = 64 }
"""


def cases(quick: bool) -> Iterator[Case]:
    """The run of a month; a tenth of it if `quick`."""
    with tempfile.TemporaryDirectory(prefix="rollstream-soak-") as scratch:
        yield from soaked(Path(scratch) / "run", STEPS_QUICK if quick else STEPS)


def soaked(folder: Path, steps: int) -> Iterator[Case]:
    """The run in this folder, to its end, and its cases."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    configuration = folder.parent / f"{folder.name}.toml"
    configuration.write_text(TABLE)
    began_s = time.monotonic()
    with (
        RunDriver(folder, configuration, [f"trainer.steps={steps}"]) as run,
        RunDriver(folder) as visitors,
    ):
        run.start()
        soak = Soak(run, visitors, steps)
        soak.watch()
    seconds = time.monotonic() - began_s
    counts: dict[str, int] = {}
    report = run.audit(bound_s=AUDIT_S)
    for invariant in report["invariants"]:
        counts.update(invariant["counts"])
    if report["violations"]:
        raise RuntimeError(f"the audit of {folder} found: {report}")
    memory = soak.samples.growths(steps, ["memory"])
    others = soak.samples.growths(steps, [*MEASURES[1:], "objects"])
    note = f"{steps:,} steps in {seconds:,.0f} s; private MB by role: {lines(memory, 9)}"
    yield alone("soak_memory", memory[0].ratio, "×", at_most=GROWTH_MAX, note=note)
    last = f"the last one of {counts['trained']:,} trained trajectories"
    note = f"{lines(others, 6)}; audits, none with a violation: {soak.audits}; {last}"
    yield alone("soak_files", others[0].ratio, "×", at_most=GROWTH_MAX, note=note)
    yield _disk_case(folder, counts)
    minutes = seconds / 60 * STEPS / steps
    note = f"{seconds:,.0f} s for {steps:,} steps"
    yield alone("soak_minutes", minutes, f"min for {STEPS:,} steps", at_most=MINUTES_MAX, note=note)


@dataclass(slots=True)
class Soak:
    """The run under way, its visitors and its audits."""

    run: RunDriver
    visitors: RunDriver
    steps: int
    samples: Samples = field(init=False)
    audits: str = ""
    _relay: RunProcess | None = None
    _visitor: RunProcess | None = None
    _visits: int = 0
    _auditor: RunProcess | None = None
    _audit_s: float = 0.0
    _audited: int = 0

    def __post_init__(self) -> None:
        self.samples = Samples(self.run.folder)

    def watch(self) -> None:
        """Look until the run ends; a run that fails, or makes no step for long, raises."""
        step, moved_s, supervisor = 0, time.monotonic() + START_S, self.run.newest()
        while not supervisor.is_over:
            let_pass(LOOK_S)
            newest = max(step, self.samples.step())
            if newest > step:
                step, moved_s = newest, time.monotonic()
                self._steer(step)
                self._measure(step)
            if time.monotonic() > moved_s + SILENT_S:
                raise RunFailed(f"no step after {step}; see {self.run.folder}/logs")
        supervisor.wait()

    def _steer(self, step: int) -> None:
        """A second relay; a rollout in turn with another; an audit now and then."""
        if self._relay is None:
            own = f"relay.folder={self.run.folder}/relay-2"
            self._relay = self.visitors.start("relay-2", "--set", own)
        if step * VISITS // self.steps > self._visits or self._visitor is None:
            if self._visitor is not None and self._visits % 2:
                self._visitor.kill()
            elif self._visitor is not None:
                self._visitor.send_signal(signal.SIGTERM)
            self._visits += 1
            self._visitor = self.visitors.start(f"visitor_{self._visits}", command="rollout")
        if self._auditor is not None and self._auditor.is_over:
            if self._auditor.process.returncode == 1:
                raise RunFailed(self._auditor.describe())
            self.audits += f"{time.monotonic() - self._audit_s:.0f} s "
            self._auditor = None
        if step * AUDITS // self.steps > self._audited and self._auditor is None:
            self._audited = step * AUDITS // self.steps
            self._auditor = self.visitors.start("audit")
            self._audit_s = time.monotonic()

    def _measure(self, step: int) -> None:
        now_s, roles = time.time(), {"supervisor": psutil.Process(self.run.newest().pid)}
        for child in roles["supervisor"].children():
            try:
                line = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "--name" in line:
                roles[line[line.index("--name") + 1]] = child
        for visitor in (self._relay, self._visitor):
            if visitor is not None and not visitor.is_over:
                roles[visitor.name] = psutil.Process(visitor.pid)
        for name, process in roles.items():
            self.samples.add_process(step, name, process, now_s)
        objects = _files(self.run.folder / "store")
        archived = sum("archive" in file.parts for file in objects)
        self.samples.add(step, "archive", {"objects": float(archived)})
        self.samples.add(step, "store", {"objects": float(len(objects) - archived)})


def _files(folder: Path) -> list[Path]:
    """Objects of a store, without its lock files; some may be deleted during the listing."""
    found = [Path(path, name) for path, _, names in os.walk(folder) for name in names]
    return [file for file in found if "~locks" not in file.parts]


def _disk_case(folder: Path, counts: Mapping[str, int]) -> Case:
    """Bytes of log and store against the arithmetic of docs/reference/sizes-and-cost.md: a WAL of
    each topic over SQLite, an archived trajectory with all other records that belong to it, and the
    versions kept.
    """
    sizes = {
        part: sum(file.stat().st_size for file in _files(folder / part)) / 1e6
        for part in ("bus", "store", "store/archive", "metrics", "logs")
    }
    wal = WAL_BYTES * len(catalogue())
    archived = 5 * counts["tokens"] + ARCHIVED_BYTES * counts["completed"]
    expected_mb = (wal + archived + VERSIONS_MAX * VERSION_BYTES) / 1e6
    note = ", ".join(f"{part} {size:,.1f} MB" for part, size in sizes.items())
    found_mb = sizes["bus"] + sizes["store"]
    met = found_mb <= expected_mb
    words = "the sizing arithmetic"
    return Case(
        "soak_disk", found_mb, "MB", words, expected_mb, found_mb / expected_mb, 1.0, met, note
    )
