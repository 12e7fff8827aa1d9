"""Answers `r/{n}/sheet`, `r/{n}/learned`, `r/{n}/metrics/{name}` and `compare/sheet`: what the
report shows of a run, as parts of a page (`rollstream/look/report/elements.py`).
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.look.explorer.explored_run import CORE_SHARE, ExploredRun
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.look.monitor.format import clock
from rollstream.look.monitor.samples import DraftTotals, PassDrafts
from rollstream.look.monitor.state import MOVES_FILE, parse_moves
from rollstream.look.query.looking import metrics_folder
from rollstream.look.query.session import QuerySession
from rollstream.look.report.cards import (
    FULL_DETAIL,
    Tile,
    card,
    chart_card,
    charts,
    group_digits,
    heading,
    scrolled,
    tiles,
)
from rollstream.look.report.comparison import OverlaidRun, overlay_charts
from rollstream.look.report.elements import PageElement, element
from rollstream.look.report.history import RunHistory, history_of
from rollstream.look.report.learning import what_was_learned
from rollstream.look.report.sheet import (
    draft_charts,
    draft_table,
    mechanics,
    metric_chart,
    other_metrics,
    run_sheet,
)
from rollstream.look.report.summary import summarise
from rollstream.look.report.timeline import draw_simulation, result_text
from rollstream.look.report.untrained import drop_bias_warnings, failed_bias_warnings
from rollstream.run.config.config import flat_settings
from rollstream.storage.metrics_file import read_metrics

# Of a living run; longer ones are thinned evenly, or each look would take too long.
LIVING_STEPS = 2000
_RANGE = re.compile(r"(\d{1,12})-(\d{1,12})")
DRAFTS = """
SELECT pass, task, sum(tokens)::BIGINT, sum(steps)::BIGINT, sum(guessed)::BIGINT,
    coalesce(sum(accepted), 0)::BIGINT, sum(asked)::BIGINT, sum(found)::BIGINT, sum(lookup_s)
FROM drafts GROUP BY pass, task ORDER BY pass, task
"""
SIMULATED = (
    "Its steps and the time of its rollouts are those of a model of a cluster. It has no "
    "trajectories, groups, rewards, losses, weights or log, so the views of these are left out; "
    "Settings has its figures."
)


class RunSheets:
    """Answers `sheet` of one run, for any thread."""

    def __init__(self, run: ExploredRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._lock = threading.Lock()
        self._newest: dict[str, Any] = {}
        self._due_s = float("-inf")

    def show(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns the answer; with `steps=FROM-TO` the curves have these steps alone. That of a
        living run is renewed after `again_s` seconds at the earliest: the machine may be the one
        that trains.
        """
        steps = query.get("steps", "")
        if steps:
            return _sheet(self._run, steps)
        with self._lock:
            begun_s = self._clock()
            if _is_living(self._run) and self._newest and begun_s < self._due_s:
                return {**self._newest, "again_s": self._due_s - begun_s}
            self._newest = _sheet(self._run)
            took_s = self._clock() - begun_s
            self._due_s = begun_s + took_s / CORE_SHARE
            return self._newest


def _sheet(run: ExploredRun, steps: str = "") -> dict[str, Any]:
    history = explored_history(run)
    if isinstance(run.location, SimulatedLocation):
        _narrow(history, steps)
        return {"parts": _simulated_sheet(run, run.location, history), "metrics": []}
    summary = summarise(history)
    _narrow(history, steps)
    parts = run_sheet(history, summary, run=run.number)
    return {"parts": parts, "metrics": other_metrics(history)}


def show_metric(run: ExploredRun, name: str) -> dict[str, Any]:
    history = explored_history(run)
    if name not in other_metrics(history):
        raise ObjectMissing(f"no step has a metric {name[:80]!r}")
    return {"parts": [chart_card(metric_chart(history, name), FULL_DETAIL)]}


def show_learned(run: ExploredRun) -> dict[str, Any]:
    """Answers `learned`: what takes queries over all records."""
    if isinstance(run.location, SimulatedLocation):
        return {"parts": []}
    history = explored_history(run)
    try:
        with QuerySession(run.location, lambda text: None) as session:
            learning = what_was_learned(history, session)
            rows = [row for rows in session.answer(DRAFTS).batches for row in rows]
    except ConfigurationError as error:  # one odd record can end a query over all of them
        return {"parts": [card("What was learned", str(error))]}
    drafts = [PassDrafts(number, task, DraftTotals(*totals)) for number, task, *totals in rows]
    drawn = charts([*learning.charts, *draft_charts(drafts)], FULL_DETAIL)
    return {"parts": [*drawn, *learning.cards, *draft_table(drafts)]}


def compared_sheet(runs: Sequence[ExploredRun]) -> dict[str, Any]:
    """Answers `compare/sheet`: the curves of several runs."""
    histories = [explored_history(run) for run in runs]
    overlaid = [
        OverlaidRun(run.name, history, summarise(history))
        for run, history in zip(runs, histories, strict=True)
    ]
    return {"parts": overlay_charts(overlaid)}


def explored_history(run: ExploredRun) -> RunHistory:
    """Returns what the index has of the run by now, and what stands beside the log."""
    folder = metrics_folder(run.location)
    history = history_of(run.index, run.supervised(), _idle_s(run), with_drafts=False)
    if _is_living(run) and len(history.steps) > LIVING_STEPS:
        every = -(-len(history.steps) // LIVING_STEPS)
        last = max(history.steps)
        history.steps = {
            step: done for step, done in history.steps.items() if step % every == 0 or step == last
        }
    history.configuration = (
        {} if run.configuration is None else {**flat_settings(run.configuration), "run": run.name}
    ) or {"run": run.name}
    evaluations = run.location.evaluations
    history.evaluations = [] if evaluations is None else read_metrics(evaluations)
    history.moves = parse_moves(read_metrics(folder / MOVES_FILE))
    if run.state is not None:
        history.state = run.state
    if run.snapshot is not None:
        history.live = run.snapshot
        history.concerns = (
            *run.snapshot.concerns,
            *drop_bias_warnings(history.dropped),
            *failed_bias_warnings(history.episodes),
        )
    return history


def _is_living(run: ExploredRun) -> bool:
    return run.phase() in ("starting", "training")


def _idle_s(run: ExploredRun) -> dict[str, float]:
    """Returns the idle seconds of each rollout, as far as its newest heartbeats have them."""
    beats = {} if run.state is None else run.state.rollouts
    return {
        name: sum({beat.term: beat.idle_s for beat in of_rollout}.values())
        for name, of_rollout in beats.items()
    }


def _narrow(history: RunHistory, steps: str) -> None:
    if not steps:
        return
    match = _RANGE.fullmatch(steps)
    if match is None:
        raise WrongRequest("steps: write FROM-TO, e.g. 100-200")
    first, last = int(match[1]), int(match[2])
    history.steps = {step: d for step, d in history.steps.items() if first <= step <= last}
    history.evaluations = [e for e in history.evaluations if first <= e["step"] <= last]


def _simulated_sheet(
    run: ExploredRun, location: SimulatedLocation, history: RunHistory
) -> list[PageElement]:
    result = location.known
    shown = [
        Tile("run.steps", str(len(history.steps)), href=f"#/r/{run.number}/steps"),
        Tile("run.tokens_per_s", group_digits(result.tokens_per_s)),
        Tile("run.generated_per_s", group_digits(result.generated_per_s)),
        Tile("run.seconds", clock(result.seconds)),
    ]
    line = f"simulated, {clock(result.seconds)} of virtual time"
    timeline = scrolled("wide", "timeline", draw_simulation(result))
    return [
        heading(run.name, line),
        card("A simulated run", "", element("p", {}, SIMULATED)),
        tiles(shown),
        *charts(mechanics(history), FULL_DETAIL),
        card("Rollouts by version", result_text(result), timeline),
    ]
