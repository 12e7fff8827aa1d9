"""Answers `runs` and `r/{n}/settings`: the shown runs, and where each stands now."""

from typing import Any

from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.look.index.figures import run_span
from rollstream.producers.engines.kind import has_model

# Settings that every view shows.
SHOWN = {
    "max_lag": "dispatch.max_lag",
    "on_update": "rollouts.on_update",
    "engine": "rollouts.engine",
    "groups_per_step": "trainer.groups_per_step",
    "samples_per_group": "trainer.samples_per_group",
    "advantage": "trainer.advantage",
    "loss": "trainer.loss",
    "tasks": "task.name",
    "model": "model.path",
    "seed": "seed",
}


def run_line(run: ExploredRun) -> dict[str, Any]:
    """Returns the RUN object of `runs`."""
    shown = run.snapshot
    steps = run.index.value("SELECT max(step) FROM done")
    phase = run.phase()
    return {
        "run": run.number,
        "name": run.name,
        "place": _without_password(run.location.name),
        "phase": phase,
        "living": phase in ("starting", "training"),
        "paced": not has_model(run.settings.get("rollouts.engine")),
        "simulated": isinstance(run.location, SimulatedLocation),
        "replay": run.replayed,
        "steps": shown.steps if shown and run.settings else steps,
        "step": steps or 0,
        "has_log": run.location.bus is not None,
        "has_archive": run.location.has_store,
        "has_text": run.text.is_known,
        "span": span_of(run),
        "settings": {name: run.settings.get(key) for name, key in SHOWN.items()},
        "trouble": run.trouble or (shown.trouble if shown else ""),
        "index": run.index.progress.line(),
    }


def show_settings(run: ExploredRun) -> dict[str, Any]:
    """Answers `settings`, without secrets."""
    configuration = run.location.configuration
    return {
        "settings": [{"name": key, "value": value} for key, value in run.settings.items()],
        "revision": str(configuration.get("code_revision", "")),
    }


def span_of(run: ExploredRun) -> list[float] | None:
    """Returns the times of the run's first and last work; None without any."""
    if isinstance(run.location, SimulatedLocation):
        return [0.0, run.location.known.seconds]
    span = run.index.unchanged("span", lambda: run_span(run.index))
    return None if span is None else [*span]


def _without_password(url: str) -> str:
    head, separator, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{head}{separator}***@{host}" if at and user else url
