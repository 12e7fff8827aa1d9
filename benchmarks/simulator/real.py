"""The simulator against real runs: runs of real processes on this machine, predicted from their
configuration (`sim_vs_real_error`).

A prediction is given the run's work (the lengths of its answers) and its machines: the roofline of
the configuration (paced) or of `rollstream profile` (torch). What it cannot know otherwise is
measured in one run per engine that is not among those predicted: seconds until a version is out, of
a swap, of a trained token, and between two decode steps, and how much longer a step lasts beside a
trainer than alone (torch). A window starts when the start of the rollouts no longer matters and
ends with the last step.

The runs of `examples/longtail-model.toml` have four rollouts and a trainer on two cores. They are
predicted as `rollstream tune` does it, from one recorded run under `in_flight`, and their speed
alone is compared: what a rollout is busy for is processor time there.

What a run showed is kept in a folder of the system's temporary ones until all runs are done, so
that a second start continues; delete it to begin again.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.case import Case, alone
from benchmarks.repack.model_arm import EXAMPLE as LONG_TAIL, PATIENT
from benchmarks.runs.quickstart import QUICKSTART, warm_model
from benchmarks.runs.watched import EXAMPLE, SETTINGS, watched
from benchmarks.simulator.expected import expected_of, machine_of
from benchmarks.simulator.observed import (
    Asked,
    Overheads,
    Real,
    asked,
    decoding_of,
    observed,
    overheads_of,
)
from benchmarks.tune.hand import (
    KeptResults,
    TuningWorld,
    chosen,
    profile_engine,
    recorded_machine,
)
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.run.config.settings import Configuration
from rollstream.simulator.experiment import Prediction

SKIP = {"paced": 2, "torch": 10}  # steps in which processes start and rollouts fill
STEPS = {"paced": 8, "torch": 50}  # in the window, so that its drains have different phases
ERROR_MAX = 0.10
PACED = (
    "trainer.groups_per_step=96", "task.options.prompts=192",
    "paced.weights_bytes=50000000",
)  # fmt: skip
TORCH = (
    "evaluation.enabled=false", "rollouts.niceness=0",
    "rollouts.status_s=0.25", "rollouts.count=1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings on top of `examples/longtail.toml` (`paced`) or of the quickstart (`torch`)."""

    engine: str
    name: str
    overrides: tuple[str, ...]


KEEP, FLIGHT = "rollouts.on_update=keep_version", "rollouts.on_update=in_flight"
MEASURED = {
    "paced": Setting("paced", "in flight, 4 × 64", (FLIGHT, "dispatch.max_lag=4")),
    "torch": Setting("torch", "in flight, 1 × 48", ("rollouts.slots=48",)),
}
"""The runs by which a machine is calibrated."""
PREDICTED = (
    Setting("paced", "keep_version with repack, 4 × 64", (KEEP, "dispatch.max_lag=4")),
    Setting(
        "paced",
        "keep_version without repack, 3 × 48",
        (
            KEEP, "dispatch.max_lag=4", "dispatch.repack=false", "rollouts.count=3",
            "rollouts.slots=48", "paced.kv_tokens=140000",
        ),
    ),
    Setting(
        "paced",
        "in flight, KV that binds, 2 × 96",
        (
            FLIGHT, "dispatch.max_lag=2", "rollouts.count=2", "rollouts.slots=96",
            "paced.kv_tokens=150000",
        ),
    ),
    Setting("torch", "in flight, 1 × 96", ("rollouts.slots=96",)),
)  # fmt: skip
MODEL = TuningWorld(
    name="model",
    example=LONG_TAIL,
    settings=(
        *PATIENT, "dispatch.placement=room", "rollouts.drafts=off", "rollouts.batch_max=32", FLIGHT,
    ),
    gpus=6,
    hand=((), (KEEP,), (KEEP, "dispatch.repack=false")),
    first=8,
    last=44,
)  # fmt: skip
"""The recorded run, which is not predicted, then the predicted ones. All slots are the batch that
repack fills, as in a run without a profile.
"""
MODEL_RUNS = 3  # of each setting, in turn: a run of one minute varies by a tenth


def cases(quick: bool) -> Iterator[Case]:
    """Yields the largest of all errors, each run in the note; only the first setting if `quick`."""
    worst, notes = 0.0, list[str]()
    settings = PREDICTED[:1] if quick else PREDICTED
    engines = sorted({setting.engine for setting in settings})
    base = Path(tempfile.gettempdir()) / f"rollstream-predicted{'-quick' if quick else ''}"
    base.mkdir(exist_ok=True)
    warm = warm_model(base) if "torch" in engines else base
    measured = {engine: kept_run(base, MEASURED[engine], warm) for engine in engines}
    machines = {engine: machine_of(real, base) for engine, real in measured.items()}
    for setting in settings:
        real = kept_run(base, setting, warm)
        expected = expected_of(real, machines[setting.engine])
        worst = max(worst, *errors_of(expected, real.found).values())
        notes.append(f"{setting.engine}, {setting.name}: {_words(expected, real.found)}")
    if not quick:
        errors, words = model_errors(base)
        worst, notes = max(worst, *errors), [*notes, *words]
    note = f"tokens/s relative, shares in points; real → predicted: {'; '.join(notes)}"
    yield alone("sim_vs_real_error", worst, "share", at_most=ERROR_MAX, note=note)
    shutil.rmtree(base)


def model_errors(base: Path) -> tuple[list[float], list[str]]:
    """Returns the relative errors of the speeds predicted for `MODEL` against the medians of
    `MODEL_RUNS` runs in turn, and each as text. The first of its settings is the recorded run,
    whose engine is profiled.
    """
    kept, warm = KeptResults(base), warm_model(base / "model", MODEL.example)
    world = replace(MODEL, settings=(*MODEL.settings, f"model.path={warm}"))
    for number, settings in product(range(1, MODEL_RUNS), world.hand):
        kept.measured(world, settings, number)
    speeds = {settings: kept.measured(world, settings, MODEL_RUNS) for settings in world.hand}
    profile_engine(world, kept.recorded(world))
    machine = recorded_machine(world, kept.recorded(world))
    errors, words = list[float](), list[str]()
    for settings, real in list(speeds.items())[1:]:
        expected = machine.predicted(chosen(world, settings), world.first)
        speed = expected.tokens_per_s if expected is not None else 0.0
        errors.append(abs(speed / real - 1))
        words.append(f"model, {' '.join(settings)}: {real:,.0f} → {speed:,.0f} tok/s")
    return errors, words


class KeptRun(msgspec.Struct, frozen=True):
    """What one run showed, without its configuration."""

    found: Prediction
    overheads: Overheads
    work: Asked


def overrides_of(setting: Setting, warm: Path) -> tuple[Path, tuple[str, ...]]:
    """The example, with these settings."""
    steps = f"trainer.steps={SKIP[setting.engine] + STEPS[setting.engine]}"
    if setting.engine == "paced":
        return EXAMPLE, (steps, *PACED, *setting.overrides)
    return QUICKSTART, (steps, *TORCH, f"model.path={warm}", *setting.overrides)


def kept_run(base: Path, setting: Setting, warm: Path) -> Real:
    """Returns what the run of a setting shows; it runs unless that is known."""
    example, overrides = overrides_of(setting, warm)
    configuration = load(example, (*SETTINGS, *overrides))
    path = base / f"{setting.engine} {setting.name}.json"
    if path.exists():
        kept = msgspec.json.decode(path.read_bytes(), type=KeptRun)
    else:
        kept = _run(base / "run", example, overrides, configuration, SKIP[setting.engine])
        path.write_bytes(msgspec.json.encode(kept))
    return Real(configuration, SKIP[setting.engine], kept.found, kept.overheads, kept.work)


def _run(
    folder: Path, example: Path, overrides: tuple[str, ...], c: Configuration, skipped: int
) -> KeptRun:
    """Runs to the end of the last step."""
    last = c.trainer.steps
    shutil.rmtree(folder, ignore_errors=True)
    with watched(folder, overrides, example) as run:
        run.wait_for(lambda: last in run.steps)
        run.rest(1.0)  # a heartbeat after the last step's end
        found, decoding = observed(run, skipped, last), decoding_of(run, skipped, last)
    bus = open_run_log_for_writing(c, folder)
    kept = KeptRun(found, overheads_of(bus, decoding), asked(bus))
    bus.close()
    shutil.rmtree(folder)  # gigabytes
    return kept


def errors_of(expected: Prediction, found: Prediction) -> dict[str, float]:
    """Tokens per second differ relatively; shares differ in percentage points."""
    return {
        "tokens/s": abs(expected.tokens_per_s / found.tokens_per_s - 1),
        "KV": abs(expected.kv_utilisation - found.kv_utilisation),
        "idle": abs(expected.idle_share - found.idle_share),
    }


def _words(expected: Prediction, found: Prediction) -> str:
    return (
        f"{found.tokens_per_s:,.0f} → {expected.tokens_per_s:,.0f} tok/s, KV "
        f"{found.kv_utilisation:.0%} → {expected.kv_utilisation:.0%}, idle "
        f"{found.idle_share:.0%} → {expected.idle_share:.0%}"
    )
