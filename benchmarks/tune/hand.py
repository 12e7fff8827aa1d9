"""Runs of real processes under settings that are tried by hand (`TuningWorld`), and under those
that `rollstream tune` proposes; results are kept in a folder, so an interrupted benchmark resumes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.runs.watched import SETTINGS, watched
from rollstream.plan.tuning.choices import TuningChoice, choice_of
from rollstream.plan.tuning.machine import TuningMachine, machine_of
from rollstream.plan.tuning.recorded import read_engine, read_run
from rollstream.run.config.config import load
from rollstream.storage.metrics_file import MetricsFile, read_metrics

Overrides = tuple[str, ...]
TUNE_S = 1_800.0  # most seconds of one proposal


@dataclass(frozen=True, slots=True)
class TuningWorld:
    """A configuration (`example` with `settings`), the GPUs to tune it for, the settings tried by
    hand, and the steps between whose ends a run is measured. The first of `hand` is (): the present
    settings, whose recorded run `tune` reads.
    """

    name: str
    example: Path
    settings: Overrides
    gpus: int
    hand: tuple[Overrides, ...]
    first: int
    last: int


@dataclass(slots=True)
class KeptResults:
    """Speeds of measured runs by world and settings, in a file of JSON lines in `folder`."""

    folder: Path

    def speeds(self, world: TuningWorld, settings: Overrides) -> list[float]:
        """Returns the trained tokens per second of each run with these settings, in any order."""
        lines = read_metrics(self.folder / "speeds.jsonl")
        return [
            float(one["tokens_per_s"])
            for one in lines
            if (one["world"], sorted(one["settings"])) == (world.name, sorted(settings))
        ]

    def add(self, world: TuningWorld, settings: Overrides, tokens_per_s: float) -> None:
        with MetricsFile(self.folder / "speeds.jsonl") as lines:
            lines.append(
                {"world": world.name, "settings": list(settings), "tokens_per_s": tokens_per_s}
            )

    def measured(self, world: TuningWorld, settings: Overrides, runs: int = 1) -> float:
        """Returns the median speed of `runs` runs, of which those that are missing are made."""
        while len(self.speeds(world, settings)) < runs:
            self.add(world, settings, self._run(world, settings))
        return statistics.median(self.speeds(world, settings))

    def recorded(self, world: TuningWorld) -> Path:
        """Returns the folder of the run under the present settings."""
        return self.folder / f"{world.name}-recorded"

    def _run(self, world: TuningWorld, settings: Overrides) -> float:
        """Runs to the end of step `world.last`; returns the trained tokens per second between the
        ends of `first` and `last`. Only the first run under the present settings is kept.
        """
        is_kept = not settings and not self.speeds(world, settings)
        folder = self.recorded(world) if is_kept else self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        with watched(folder, (*world.settings, *settings), world.example) as run:
            run.wait_for(lambda: world.last in run.steps)
            begin, end = run.steps[world.first], run.steps[world.last]
            steps = range(world.first + 1, world.last + 1)
            tokens = sum(run.steps[step].metrics["tokens_trained"] for step in steps)
        if not is_kept:
            shutil.rmtree(folder)
        return tokens / (end.time_s - begin.time_s)


def proposed(world: TuningWorld, recorded: Path) -> tuple[Overrides, float]:
    """Returns the settings that the command proposes from the recorded run, as overrides, and the
    speed that it predicts.
    """
    words = [sys.executable, "-m", "rollstream", "tune", str(world.example), str(recorded)]
    words += ["--gpus", str(world.gpus), "--json", *_set((*SETTINGS, *world.settings))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TUNE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"tune failed: {done.stderr}")
    found = json.loads(done.stdout)
    changes: dict[str, object] = found["settings"]
    return tuple(f"{key}={_text(value)}" for key, value in sorted(changes.items())), float(
        found["proposed"]["tokens_per_s"]
    )


def recorded_machine(world: TuningWorld, recorded: Path) -> TuningMachine:
    """Returns the machine by which the command predicts, from the recorded run."""
    c = load(world.example, (*SETTINGS, *world.settings))
    run, cores = read_run(str(recorded)), len(os.sched_getaffinity(0))
    return machine_of(c, read_engine(c, [recorded]), run.measured, run.configuration, cores)


def profile_engine(world: TuningWorld, recorded: Path) -> None:
    """Measures the step times of the world's engine; the profile is in the recorded run's folder,
    where the command finds it.
    """
    settings = _set((*SETTINGS, *world.settings))
    words = [sys.executable, "-m", "rollstream", "profile", str(world.example), *settings]
    words += ["--run", str(recorded)]
    subprocess.run(words, check=True, capture_output=True, timeout=TUNE_S)


def chosen(world: TuningWorld, settings: Overrides) -> TuningChoice:
    """Returns the choice that these settings make. The accelerators of a paced trainer follow from
    its seconds per token.
    """
    base = load(world.example, (*SETTINGS, *world.settings))
    c = load(world.example, (*SETTINGS, *world.settings, *settings))
    if c.trainer.learner != "paced":
        return choice_of(c)
    units = round(base.paced.train_token_s / c.paced.train_token_s)
    return replace(choice_of(c), trainer_gpus=units)


def _set(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
