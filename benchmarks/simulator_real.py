"""Whether the simulator earns trust: runs of real processes on this machine, predicted from their
configuration (`sim_vs_real_error`).

A prediction is given the run's work, the lengths of its answers, as it is given its machines: the
roofline of the configuration (paced) or of `rollstream profile` (torch). What it cannot know
besides, seconds until a version is out, of a swap, and of a trained token, is measured in one run
per engine that is not among those predicted. A window begins when the start of the rollouts no
longer matters and ends with the last step.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.pipeline import QUICKSTART, warm_model
from benchmarks.repack_runs import EXAMPLE, SETTINGS, watched
from benchmarks.simulator_seen import Asked, Overheads, asked, observed, overheads_of
from producers.engines.connect import lengths_from, roofline_from
from producers.engines.paced.lengths import Distribution, Trace
from producers.engines.paced.roofline import Roofline
from rollstream.config import Configuration, load
from rollstream.folder import run_log
from rollstream.profiling import measure_profile
from simulator.jumps import faster
from simulator.predict import Prediction, RealSettings, predict

SKIP, STEPS = 2, 4  # steps in which processes start and rollouts fill; steps in the window
PROMPTS = 1 << 20  # of the quickstart: no prompt comes twice
ERROR_MAX = 0.10
PACED = (
    f"trainer.steps={SKIP + STEPS}", "trainer.groups_per_step=96", "task.options.prompts=192",
    "paced.weights_bytes=50000000",
)  # fmt: skip
TORCH = (
    f"trainer.steps={SKIP + 4 * STEPS}", "evaluation.enabled=false", "rollouts.niceness=0",
    "rollouts.status_s=0.25", "rollouts.count=1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """What is laid over `examples/longtail.toml` (`paced`) or over the quickstart (`torch`)."""

    engine: str
    name: str
    overrides: tuple[str, ...]


KEEP, FLIGHT = "rollouts.on_update=keep_version", "rollouts.on_update=in_flight"
MEASURED = {
    "paced": Setting("paced", "in flight, 4 × 64", (FLIGHT, "dispatch.max_lag=4")),
    "torch": Setting("torch", "in flight, 1 × 48", ("rollouts.slots=48",)),
}
"""Overheads are those of these runs."""
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


@dataclass(frozen=True, slots=True)
class Real:
    """What a run was, what it measured, and its work."""

    configuration: Configuration
    found: Prediction
    overheads: Overheads
    work: Asked


def cases(quick: bool) -> Iterator[Case]:
    """The worst of all errors, each run in the note; the first setting alone if `quick`."""
    worst, notes = 0.0, list[str]()
    settings = PREDICTED[:1] if quick else PREDICTED
    engines = sorted({setting.engine for setting in settings})
    with tempfile.TemporaryDirectory(prefix="rollstream-predicted-") as scratch:
        base = Path(scratch)
        warm = warm_model(base) if "torch" in engines else base
        measured = {engine: real_run(base / engine, MEASURED[engine], warm) for engine in engines}
        for number, setting in enumerate(settings):
            real = real_run(base / f"run-{number}", setting, warm)
            expected = predicted(real, measured[setting.engine].overheads, base)
            worst = max(worst, *errors_of(expected, real.found).values())
            notes.append(f"{setting.engine}, {setting.name}: {_words(expected, real.found)}")
    note = f"tokens/s relative, shares in points; real → predicted: {'; '.join(notes)}"
    yield alone("sim_vs_real_error", worst, "share", at_most=ERROR_MAX, note=note)


def overrides_of(setting: Setting, warm: Path) -> tuple[Path, tuple[str, ...]]:
    """The example, and what is laid over it."""
    if setting.engine == "paced":
        return EXAMPLE, (*PACED, *setting.overrides)
    return QUICKSTART, (*TORCH, f"model.path={warm}", *setting.overrides)


def real_run(folder: Path, setting: Setting, warm: Path) -> Real:
    """The run of a setting, to the end of its last step."""
    example, overrides = overrides_of(setting, warm)
    configuration = load(example, (*SETTINGS, *overrides))
    last = configuration.trainer.steps
    with watched(folder, overrides, example) as run:
        run.until(lambda: last in run.steps)
        run.wait(1.0)  # a heartbeat after the last step's end
        found = observed(run, SKIP, last)
    bus = run_log(configuration, folder)
    real = Real(configuration, found, overheads_of(bus), asked(bus))
    bus.close()
    shutil.rmtree(folder)  # gigabytes
    return real


def predicted(real: Real, overheads: Overheads, base: Path) -> Prediction:
    """By its configuration and work, and the overheads of another run."""
    c = real.configuration
    if c.rollouts.engine == "paced":
        return predict(paced_settings(c, overheads, real.work))
    profile = measure_profile(c, base / "profile", lambda point: None)
    lengths = Trace(tuple(sorted(float(n) for group in real.work.lengths for n in group)))
    settings = _settings(c, overheads, real.work, profile.roofline, lengths)
    return predict(replace(settings, train_token_s=overheads.train_token_s))


def paced_settings(c: Configuration, overheads: Overheads, work: Asked) -> RealSettings:
    """In seconds on the wall."""
    scale = c.paced.time_scale
    roofline = faster(roofline_from(c.paced.roofline), scale)
    lengths = lengths_from(c.paced.lengths)
    return replace(
        _settings(c, overheads, work, roofline, lengths.distribution),
        kv_capacity=c.paced.kv_tokens or c.rollouts.slots * c.rollouts.context_max,
        train_step_s=c.paced.train_step_s / scale,
        train_token_s=c.paced.train_token_s / scale,
        correlation=lengths.correlation,
        prompts=int(str(c.task.options["prompts"])),
    )


def _settings(
    c: Configuration, over: Overheads, work: Asked, roofline: Roofline, lengths: Distribution
) -> RealSettings:
    assert c.dispatch.max_lag is not None, "the simulator bounds a real run by its lag"
    return RealSettings(
        rollouts=c.rollouts.count,
        roofline=roofline,
        slots=c.rollouts.slots,
        kv_capacity=c.rollouts.slots * c.rollouts.context_max,
        lengths=lengths,
        length_max=c.sampling.tokens_max,
        groups_per_step=c.trainer.groups_per_step,
        samples_per_group=c.trainer.samples_per_group,
        steps=c.trainer.steps,
        max_lag=c.dispatch.max_lag,
        on_update=c.rollouts.on_update,
        skip=SKIP,
        update_s=over.update_s,
        publish_s=over.publish_s,
        prompt_tokens=work.prompt_tokens,
        prompts=PROMPTS,
        repack=c.dispatch.repack,
        queue_per_slot=c.dispatch.queue_per_slot,
        repack_every_s=c.dispatch.repack_every_s,
        recorded=work.lengths,
    )


def errors_of(expected: Prediction, found: Prediction) -> dict[str, float]:
    """Of tokens per second relative; shares differ in points of a whole."""
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
