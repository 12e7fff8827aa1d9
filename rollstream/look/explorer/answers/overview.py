"""Answers `runs`, `r/{n}/settings` and `r/{n}/overview`: the shown runs, their curves, and where a
run stands now, by the same state and warnings as `rollstream top`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.look.index.figures import (
    finishes,
    outcomes,
    reasons,
    rollout_totals,
    run_span,
    run_totals,
)
from rollstream.look.query.output import json_value
from rollstream.producers.engines.kind import has_model
from rollstream.storage.metrics_file import read_metrics

# Steps of a curve; longer runs are thinned evenly.
CURVE_STEPS = 2000
CURVES_MAX = 120  # metrics by name
REASONS_MAX = 30
ROLLOUTS_MAX = 1024
FIRST_METRICS = (
    "reward_mean", "accuracy", "loss", "entropy", "kl", "ess", "clipped", "lag_consumed_mean",
    "lag_finish_mean", "length_median", "length_p99", "tokens_trained", "seconds", "wait_s",
)  # fmt: skip
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


def show_overview(run: ExploredRun) -> dict[str, Any]:
    """Answers `overview`."""
    shown = run.snapshot
    return {
        "run": run_line(run),
        "evaluations": _evaluations(run),
        "now": _now(run),
        "rollouts": _rollouts(run),
        "warnings": []
        if shown is None
        else [{"name": w.kind, "text": w.what, "advice": w.do} for w in shown.concerns],
        **run.index.unchanged("overview", lambda: _counted(run)),
        "index": run.index.progress.line(),
    }


def _counted(run: ExploredRun) -> dict[str, Any]:
    return {
        "metrics": curves(run),
        "outcomes": {"groups": outcomes(run.index), "trajectories": finishes(run.index)},
        "reasons": reasons(run.index, REASONS_MAX),
        "tasks": run.index.rows(
            "SELECT task, count(*) AS trajectories, avg(reward) AS reward_mean, "
            "avg(tokens) FILTER (finish != 'dead') AS tokens_mean FROM t "
            "GROUP BY ALL ORDER BY task LIMIT 100"
        ),
    }


def curves(run: ExploredRun) -> dict[str, Any]:
    count = run.index.value("SELECT count(*) FROM steps") or 0
    every = max(1, -(-count // CURVE_STEPS))
    columns = run.index.columns(
        f"SELECT step, time_s, o FROM steps WHERE step % {every} = 0 OR "
        "step = (SELECT max(step) FROM done) ORDER BY step"
    )
    metrics = _metrics_at(run, columns["o"])
    present = {name for values in metrics for name in values}
    first = [name for name in FIRST_METRICS if name in present]
    names = [*first, *sorted(present - set(first))][:CURVES_MAX]
    return {
        "names": names,
        "step": columns["step"],
        "time_s": columns["time_s"],
        "values": {name: [values.get(name) for values in metrics] for name in names},
        "thinned": every > 1,
    }


def _metrics_at(run: ExploredRun, offsets: Sequence[int]) -> list[Mapping[str, Any]]:
    before = run.step_metrics
    # Metrics of an earlier call are not read again: of a long run that lives, most of an answer's
    # time went into them.
    missing = [offset for offset in offsets if offset not in before]
    if missing:
        sql = "SELECT o, metrics FROM done WHERE o IN (SELECT unnest(?::BIGINT[]))"
        new = run.index.columns(sql, [missing])
        before = {**before, **dict(zip(new["o"], new["metrics"], strict=True))}
    run.step_metrics = {offset: before[offset] for offset in offsets}
    return [before[offset] for offset in offsets]


def _evaluations(run: ExploredRun) -> list[Any]:
    path = run.location.evaluations
    lines = read_metrics(path) if path is not None and path.is_file() else []
    return json_value(sorted(lines, key=lambda line: line["step"])[-CURVE_STEPS:])


def _now(run: ExploredRun) -> dict[str, Any]:
    shown = run.snapshot
    step = run.index.value("SELECT max(step) FROM done") or 0
    version = run.index.value("SELECT max(version) FROM done")
    if isinstance(run.location, SimulatedLocation):
        simulation = run.location.known
        return {
            "step": step,
            "version": version,
            "seconds": simulation.seconds,
            "tokens_per_s": simulation.tokens_per_s,
            "generated_per_s": simulation.generated_per_s,
        }
    totals = run.index.unchanged("figures", lambda: run_totals(run.index, run.sessions()))
    names = ("seconds", "tokens_trained", "tokens_per_s", "lag_consumed_mean", "lag_consumed_max")
    figures = {"step": step, "version": version, **{n: getattr(totals, n) for n in names}}
    if shown is None:
        return figures
    return figures | {
        "steps": shown.steps if run.settings else step,
        "elapsed_s": shown.elapsed_s,
        "generated_per_s": json_value(shown.pace.generated_per_s),
        "recent_trained_per_s": json_value(shown.pace.recent_trained_per_s),
        "step_s": json_value(shown.pace.step_s),
        "left_s": json_value(shown.pace.left_s),
        "version": version if shown.version is None else shown.version,
        "open_groups": shown.queue.open_groups,
        "ready_groups": shown.queue.ready_groups,
        "restarts": shown.restarts,
        "phase": shown.phase,
    }


def _rollouts(run: ExploredRun) -> list[dict[str, Any]]:
    beats = {} if run.state is None else run.state.rollouts
    rollouts: list[dict[str, Any]] = []
    counted = run.index.unchanged("rollouts", lambda: rollout_totals(run.index))
    for name in sorted({*counted, *beats})[:ROLLOUTS_MAX]:
        beat = beats[name][-1] if name in beats else None
        row = counted.get(name, {})
        rollouts.append(
            {
                "rollout": name,
                "term": row.get("term") if beat is None else beat.term,
                "trajectories": row.get("trajectories", 0),
                "tokens": row.get("tokens") or 0,
                "running": beat and beat.running,
                "waiting": beat and beat.waiting,
                "slots": beat and beat.slots,
                "version": beat and beat.version.number,
                "tokens_per_s": beat and beat.tokens_per_s,
                "health": beat and beat.health,
                "time_s": beat and beat.time_s,
            }
        )
    return rollouts


def _without_password(url: str) -> str:
    head, separator, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{head}{separator}***@{host}" if at and user else url
