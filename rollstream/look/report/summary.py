"""Reads the history of a run, which may continue meanwhile, and summarises it for terminal, report
and JSON output. Nothing is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from rollstream.errors import CorruptObject
from rollstream.foreign_json import parse_loose_json
from rollstream.look.index.parentage import read_parentage
from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.feed import RunFeed
from rollstream.look.monitor.format import clock
from rollstream.look.monitor.snapshot import run_settings_of, take_snapshot
from rollstream.look.monitor.state import MOVES_FILE, RunState, parse_moves
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import metrics_folder, open_run_view
from rollstream.look.report.cards import group_digits
from rollstream.look.report.history import RunHistory, history_of
from rollstream.look.report.untrained import (
    DropComparison,
    EpisodeComparison,
    causes_text,
    drop_bias_warnings,
    failed_bias_warnings,
)
from rollstream.producers.engines.kind import has_model
from rollstream.run.config.config import flat_settings, load_for_viewing
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import RolloutStatus

# The summary reports the time to this sampled held-out accuracy.
ACCURACY_GOAL = 0.75
PACED_NOTE = "paced: drawn lengths and computed times, no model"


# Prefix of pass@k in a line of `eval.jsonl`.
PASS_AT = "pass_at/"


@dataclass(frozen=True, slots=True)
class MetricChange:
    first: float
    last: float

    def text(self, form: str = ".3f") -> str:
        return f"{self.first:{form}} → {self.last:{form}}"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The most important metrics of a run; unknown values are None. `seconds` excludes the warm-up
    (`warmup_s`). `accuracy_…` and `length_…` are of held-out prompts. `goal_s` and `goal_step` are
    the time and the step at which the sampled accuracy reached `ACCURACY_GOAL`. `lag_consumed_…` is
    the lag of the tokens when they were trained.
    """

    run: str
    seed: int
    steps: int
    steps_wanted: int
    seconds: float
    warmup_s: float | None
    accuracy_sampled: MetricChange | None
    accuracy_greedy: MetricChange | None
    goal_s: float | None
    goal_step: int | None
    reward: MetricChange | None
    length_median: MetricChange | None
    length_p99: MetricChange | None
    lag_consumed_mean: float | None
    lag_consumed_max: float | None
    tokens_trained: int
    tokens_per_s: float | None
    idle_share: Mapping[str, float]
    outcomes: Mapping[str, int]
    restarts: int
    forked_from: str = ""
    is_paced: bool = False
    dropped: DropComparison | None = None
    """For their age (lag or deadline)."""
    episodes: EpisodeComparison = field(default_factory=EpisodeComparison)
    evaluated_step: int | None = None
    pass_at: Mapping[int, MetricChange] = field(default_factory=dict[int, MetricChange])

    def line(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """Returns a table for terminals of at least 60 columns."""
        table = Table(
            title=f"{self.run} · seed {self.seed}", title_justify="left", show_header=False
        )
        table.add_column(style="dim")
        table.add_column()
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def rows(self) -> list[tuple[str, str]]:
        warm = f", warm-up {self.warmup_s:.0f} s" if self.warmup_s else ""
        rows = [("steps", f"{self.steps} of {self.steps_wanted} in {clock(self.seconds)}{warm}")]
        rows += [("forked from", self.forked_from)] if self.forked_from else []
        rows += [("engine", PACED_NOTE)] if self.is_paced else []
        changes = (
            ("held-out, sampled", self.accuracy_sampled, ".3f"),
            ("held-out, greedy", self.accuracy_greedy, ".3f"),
            ("reward", self.reward, ".3f"),
            ("held-out length, median", self.length_median, ".0f"),
            ("held-out length, p99", self.length_p99, ".0f"),
        )
        passes = tuple((f"held-out, pass@{k}", change, ".3f") for k, change in self.pass_at.items())
        changes = (*changes[:1], *passes, *changes[1:])
        rows += [(name, change.text(form)) for name, change, form in changes if change]
        if self.evaluated_step is not None and self.evaluated_step < self.steps:
            rows.append(("evaluated", f"up to version {self.evaluated_step} of {self.steps}"))
        if self.goal_s is not None:
            rows.append(
                (f"{ACCURACY_GOAL} sampled", f"after {self.goal_s:.0f} s, step {self.goal_step}")
            )
        if self.tokens_per_s is not None:
            tokens, speed = group_digits(self.tokens_trained), group_digits(self.tokens_per_s)
            rows.append(("trained", f"{tokens} tokens, {speed} a second"))
        if self.lag_consumed_mean is not None:
            lag = f"{self.lag_consumed_mean:.2f} mean, {self.lag_consumed_max:.0f} at most"
            rows.append(("lag when trained", lag))
        rows.append(("groups", ", ".join(f"{n} {name}" for name, n in self.outcomes.items())))
        if self.dropped is not None and self.dropped.length_dropped is not None:
            length, trained = self.dropped.length_dropped, self.dropped.length_trained or 0.0
            number = self.dropped.dropped
            words = f"{number} answers, median {length:.0f} tokens (trained {trained:.0f})"
            rows.append(("dropped for age", words))
        rows += _episode_rows(self.episodes)
        idle = ", ".join(f"{name} {share:.0%}" for name, share in self.idle_share.items())
        rows += [("idle", idle)] if idle else []
        return [*rows, ("restarts", str(self.restarts))]


def summarise(history: RunHistory) -> RunSummary:
    """Returns the summary of a history; does no I/O."""
    figures, goal = history.figures, _goal(history)
    return RunSummary(
        run=str(history.configuration.get("run", "")),
        seed=int(history.configuration.get("seed", 0)),
        steps=figures.step,
        steps_wanted=int(history.configuration.get("trainer.steps", 0)),
        seconds=figures.seconds,
        warmup_s=history.warmup.get("seconds"),
        accuracy_sampled=_change(history.evaluated("accuracy_sampled")),
        accuracy_greedy=_change(history.evaluated("accuracy_greedy")),
        goal_s=goal and goal[0],
        goal_step=goal and goal[1],
        reward=_change(history.metric("reward_mean")),
        length_median=_change(history.evaluated("length_median")),
        length_p99=_change(history.evaluated("length_p99")),
        lag_consumed_mean=figures.lag_consumed_mean,
        lag_consumed_max=figures.lag_consumed_max,
        tokens_trained=figures.tokens_trained,
        tokens_per_s=figures.tokens_per_s,
        idle_share=_idle_shares(history),
        outcomes=history.outcomes,
        restarts=sum(history.state.restarts().values()),
        forked_from=history.forked_from,
        is_paced=not has_model(history.configuration.get("rollouts.engine")),
        dropped=history.dropped,
        episodes=history.episodes,
        evaluated_step=max((int(line["step"]) for line in history.evaluations), default=None),
        pass_at=pass_changes(history),
    )


def pass_changes(history: RunHistory) -> dict[int, MetricChange]:
    names = {name for line in history.evaluations for name in line if name.startswith(PASS_AT)}
    sizes = sorted(int(k) for name in names if (k := name.removeprefix(PASS_AT)).isdigit())
    changes = {k: _change(history.evaluated(f"{PASS_AT}{k}")) for k in sizes}
    return {k: change for k, change in changes.items() if change is not None}


def _episode_rows(episodes: EpisodeComparison) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if episodes.failed:
        text = f"{episodes.failed}: {causes_text(episodes)}"
        if episodes.length_failed is not None and episodes.length_trained is not None:
            lengths = f"{episodes.length_failed:.0f} tokens (trained {episodes.length_trained:.0f})"
            text += f"; median {lengths}"
        rows.append(("failed", text))
    repeats = sum(cause.again for cause in episodes.causes)
    rows += [("asked again", f"{repeats} replies of environments")] if repeats else []
    rows += [("released", f"{episodes.released}, not needed any more")] if episodes.released else []
    if episodes.waiting_share is not None:
        rows.append(("dialogues", f"{episodes.waiting_share:.0%} of their time waited for a reply"))
    return rows


def _change(points: list[tuple[float, float]]) -> MetricChange | None:
    return MetricChange(points[0][1], points[-1][1]) if points else None


def _goal(history: RunHistory) -> tuple[float | None, int] | None:
    first_s = history.figures.first_s
    for line in sorted(history.evaluations, key=lambda line: line["step"]):
        if (line.get("accuracy_sampled") or 0.0) >= ACCURACY_GOAL:
            seconds, done = line.get("seconds"), history.steps.get(int(line["step"]))
            if seconds is not None and done and first_s is not None:
                # The evaluation's line counts the pauses of the run as time.
                paused_s = done.time_s - first_s - history.run_s(first_s, done.time_s)
                seconds = max(0.0, seconds - paused_s)
            return seconds, int(line["step"])
    return None


def _idle_shares(history: RunHistory) -> dict[str, float]:
    seconds = history.figures.seconds
    if not seconds:
        return {}
    return {
        name: min(1.0, rollout.idle_s / seconds)
        for name, rollout in sorted(history.rollouts.items())
    }


def read_history(view: LogView, folder: RunFolder) -> RunHistory:
    """Returns the run's history up to now, from log, archive and metrics files; any of them may be
    missing. Its `concerns` are the warnings when the newest record was written, and those about
    dropped samples.
    """
    is_configured = folder.configuration.exists()
    configuration = load_for_viewing(folder.configuration) if is_configured else None
    plan = configuration and run_settings_of(configuration)
    state = plan.state() if plan else RunState()
    # A prepared run that never started has no topics yet.
    if view.bus is None or view.has("ledger"):
        feed = RunFeed(view, folder.metrics, with_archive=True)
        while feed.follow(state, 0.0):
            pass
    history = _indexed(view, folder, configuration, state)
    history.configuration = flat_settings(configuration) if configuration else {}
    history.warmup = _json(folder.model / "warmup.json")
    history.evaluations = read_metrics(folder.metrics / "eval.jsonl")
    history.moves = parse_moves(read_metrics(folder.metrics / MOVES_FILE))
    if view.store is not None and (parentage := read_parentage(view.store)):
        history.forked_from = str(parentage)
    if plan:
        # A report that is made a week later must not warn that the run is silent.
        newest_s = max(state.newest_s.values(), default=0.0)
        history.concerns = (
            *warnings_of(take_snapshot(state, plan, newest_s)),
            *drop_bias_warnings(history.dropped),
            *failed_bias_warnings(history.episodes),
        )
    return history


def _indexed(
    view: LogView, folder: RunFolder, configuration: Configuration | None, state: RunState
) -> RunHistory:
    # They import DuckDB and pyarrow, which `rollstream run` needs at its end only.
    from rollstream.look.index.index_reader import IndexReader
    from rollstream.look.index.run_index import RunIndex

    max_lag = configuration.dispatch.max_lag if configuration else None
    process_rewards = bool(configuration and configuration.trainer.process_rewards)
    with RunIndex(max_lag, process_rewards) as index:
        reader = IndexReader(view, index, with_tokens=True)
        reader.refresh()
        events = read_metrics(folder.metrics / "supervisor.jsonl")
        history = history_of(index, events, _idle_s(view))
    for hole in reader.holes:
        state.apply_hole(hole)
    history.state, history.is_tail = state, any(h.reason == "truncated" for h in reader.holes)
    return history


def _idle_s(view: LogView) -> dict[str, float]:
    """Returns the idle seconds of each rollout over all its terms."""
    by_term: dict[tuple[str, int], float] = {}
    for message in view.topic("status", skip_damaged=True).records() if view.has("status") else ():
        if isinstance(record := message.record, RolloutStatus):
            term = record.rollout, record.term
            by_term[term] = max(record.idle_s, by_term.get(term, 0.0))
    seconds: dict[str, float] = {}
    for (rollout, _), idle_s in by_term.items():
        seconds[rollout] = seconds.get(rollout, 0.0) + idle_s
    return seconds


def _json(path: Path) -> dict[str, Any]:
    try:
        value = parse_loose_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CorruptObject(f"{path} is no JSON: {error}; put back a copy of it") from error
    if not isinstance(value, dict):
        raise CorruptObject(f"{path} holds no JSON object; put back a copy of it")
    return cast("dict[str, Any]", value)


def open_history(folder: RunFolder, is_trusted: bool = False) -> RunHistory:
    location = locate_run(str(folder.path), is_trusted)
    # Refuses files that leave the run.
    metrics_folder(location)
    with open_run_view(location) as view:
        return read_history(view, folder)


def distinct_names(folders: Sequence[RunFolder]) -> list[str]:
    """Returns distinct names of the runs: their folders' names, or full paths if two are equal."""
    names = [folder.path.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
