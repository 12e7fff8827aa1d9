"""Lays out the sheet of a run from its history and summary: tiles, warnings, curves, the timeline
of its rollouts, tables. `report.html` and the explorer's overview show it. A part without data is
left out.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from heapq import nlargest
from math import isfinite
from typing import Any
from urllib.parse import quote

from rollstream.look.figures.definitions import FIGURES, figure_of
from rollstream.look.monitor.format import clock
from rollstream.look.monitor.samples import PassDrafts
from rollstream.look.query.record_times import utc_time
from rollstream.look.report.cards import (
    FULL_DETAIL,
    Detail,
    Tile,
    card,
    charts,
    defined_label,
    folded,
    group_digits,
    heading,
    linked,
    named,
    scrolled,
    table,
    tiles,
)
from rollstream.look.report.chart import Chart, Series
from rollstream.look.report.comparison import tasks_of
from rollstream.look.report.elements import Node, PageElement, element
from rollstream.look.report.history import RunHistory
from rollstream.look.report.learning import NOTHING_LEARNED, Learning
from rollstream.look.report.summary import (
    ACCURACY_GOAL,
    PACED_NOTE,
    PASS_AT,
    MetricChange,
    RunSummary,
    pass_changes,
)
from rollstream.look.report.timeline import ROWS_MAX, draw_timeline, marks_per_row
from rollstream.look.report.untrained import episode_card
from rollstream.run.config.errors import printable_value
from rollstream.run.supervisor.process import describe_exit

# The page has as many distinct colours.
TASKS_MAX = 8
# Columns of the table of rollouts.
ROLLOUT_FIGURES = ("trajectories", "tokens", "cut", "dead", "versions", "idle_s")
# Lines of the table of drafts, one per task and pass over the prompts.
PASSES_MAX = 64
# Settings in the second line of the head, with the words before their values.
HEAD_SETTINGS = (
    ("dispatch.max_lag", "lag at most "),
    ("trainer.loss", ""),
    ("rollouts.on_update", ""),
)
# The note of the chart that compares log-probabilities of engine and trainer (the mismatch).
MISMATCH_NOTE = (
    "mean |Δ log p| in nats, same tokens and version; steps without such tokens are left out"
)


def run_sheet(
    history: RunHistory,
    summary: RunSummary,
    learning: Learning = NOTHING_LEARNED,
    detail: Detail = FULL_DETAIL,
    run: str = "",
) -> list[PageElement]:
    """Returns the parts of the sheet. `run` is the run's number in the explorer, to whose views
    numbers lead; "" without an explorer.
    """
    base = f"#/r/{run}" if run else ""
    line = f"seed {summary.seed} · step {summary.steps} of {summary.steps_wanted} · "
    if summary.forked_from:
        line = f"forked from {summary.forked_from} · {line}"
    if summary.is_paced:
        line = f"{PACED_NOTE} · {line}"
    return [
        heading(summary.run or "run", line + clock(summary.seconds), _settings_line(history)),
        tiles(_tiles(history, summary, base)),
        *_warnings(history),
        *charts([*_learning(history), *_by_task(history), *learning.charts], detail),
        *learning.cards,
        *_timeline(history, detail),
        *charts([*mechanics(history), *draft_charts(history.drafts)], detail),
        _outcomes(history, base),
        *_tasks(history, base),
        *_dropped(history),
        *episode_card(history.episodes),
        *draft_table(history.drafts),
        *_rollouts(history, summary, detail),
        *_restarts(history, detail),
        *_configuration(history),
    ]


def _settings_line(history: RunHistory) -> str:
    known = history.configuration
    words = [f"{word}{known[key]}" for key, word in HEAD_SETTINGS if known.get(key) is not None]
    first_s, last_s = history.figures.first_s, history.figures.last_s
    first, last = (_time(time_s) for time_s in (first_s, last_s))
    if first and last:
        form = "%H:%M" if first.date() == last.date() else "%Y-%m-%d %H:%M"
        words.append(f"{first:%Y-%m-%d %H:%M} to {last:{form}} UTC")
    return " · ".join(words)


def _time(time_s: float | None) -> datetime | None:
    # A record may hold any number.
    return utc_time(round(1000 * time_s)) if time_s and isfinite(time_s) else None


def _tiles(history: RunHistory, summary: RunSummary, base: str) -> list[Tile]:
    def change(name: str, change: MetricChange, label: str = "") -> Tile:
        return Tile(f"{name} {name}", change.text(".2f"), "first last", label)

    def link(view: str) -> str:
        return f"{base}/{view}" if base else ""

    done, of = group_digits(summary.steps), group_digits(summary.steps_wanted)
    steps = Tile("run.steps run.steps_wanted", f"{done} / {of}", label="steps", href=link("steps"))
    shown = [steps if summary.steps_wanted else Tile("run.steps", done, href=link("steps"))]
    if summary.accuracy_sampled:
        shown.append(change("evaluation.accuracy_sampled", summary.accuracy_sampled))
    shown += [
        change(f"evaluation.pass_at/{k}", passed, f"held-out, pass@{k}")
        for k, passed in summary.pass_at.items()
    ]
    if summary.evaluated_step is not None and summary.evaluated_step < summary.steps:
        shown.append(Tile("run.evaluated", str(summary.evaluated_step)))
    if summary.accuracy_greedy:
        shown.append(change("evaluation.accuracy_greedy", summary.accuracy_greedy))
    if summary.goal_s is not None:
        label = f"to {ACCURACY_GOAL} sampled (step {summary.goal_step})"
        shown.append(Tile("run.goal_s", clock(summary.goal_s), label=label))
    if summary.reward:
        shown.append(change("step.reward_mean", summary.reward))
    if summary.outcomes["admitted"]:
        counts = (group_digits(summary.outcomes[name]) for name in ("trained", "admitted"))
        figures, label = "run.groups_trained run.groups_admitted", "groups trained of admitted"
        shown.append(Tile(figures, " / ".join(counts), label=label, href=link("groups")))
    if summary.tokens_per_s is not None:
        shown.append(Tile("run.tokens_per_s", group_digits(summary.tokens_per_s)))
    if history.live is not None and not history.live.is_over:
        speed = group_digits(history.live.pace.generated_per_s or 0.0)
        shown.append(Tile("run.generated_per_s", speed))
    if summary.lag_consumed_mean is not None:
        mean, largest = summary.lag_consumed_mean, summary.lag_consumed_max
        label, text = "mean and largest lag when trained", f"{mean:.2f} · {largest:.0f}"
        shown.append(Tile("run.lag_consumed_mean run.lag_consumed_max", text, label=label))
    # An archive alone does not know them.
    if history.events or history.state.newest_s:
        shown.append(Tile("run.restarts", str(summary.restarts)))
    return [*shown, Tile("run.seconds", clock(summary.seconds))]


def _learning(history: RunHistory) -> list[Chart]:
    accuracy = (
        _evaluated(history, _sampled_name(history), "accuracy_sampled", 1),
        _evaluated(history, "greedy", "accuracy_greedy", 2),
        *(
            _evaluated(history, f"pass@{k}", f"{PASS_AT}{k}", number)
            for number, k in enumerate([*pass_changes(history)][-6:], start=3)
        ),
    )
    lengths = (
        _of_steps(history, "median", "length_median"),
        _of_steps(history, "99th percentile", "length_p99", 2),
    )
    reward = (_of_steps(history, "mean reward", "reward_mean"),)
    by = "by version"
    return [
        Chart(
            "Held-out accuracy",
            accuracy,
            f"{by}; greedy jumps when another style becomes the most likely",
            high=1.0,
        ),
        Chart(
            "Styles of held-out answers",
            _shares(history),
            f"share of sampled answers, {by}",
            ".0%",
            high=1.0,
            stacked=True,
        ),
        Chart("Reward", reward, "mean of a step's trajectories"),
        Chart("Response length", lengths, "generated tokens of a step's trajectories", ".0f"),
    ]


def _of_steps(
    history: RunHistory, name: str, metric: str, colour: int = 1, thin: bool = False
) -> Series:
    return Series(name, history.metric(metric), colour, thin, f"step.{metric}")


def _evaluated(history: RunHistory, name: str, metric: str, colour: int) -> Series:
    return Series(name, history.evaluated(metric), colour, figure=f"evaluation.{metric}")


def _sampled_name(history: RunHistory) -> str:
    temperatures = sorted({float(line.get("temperature", 1.0)) for line in history.evaluations})
    return f"sampled (T = {', '.join(f'{temperature:g}' for temperature in temperatures) or 1})"


def _by_task(history: RunHistory) -> list[Chart]:
    tasks = tasks_of(history)
    shown = tasks if len(tasks) > 1 else []
    rewards = [(task, history.metric(metric), f"step.{metric}") for metric, task in shown]
    prefix = "accuracy_sampled/"
    names = sorted({n for line in history.evaluations for n in line if n.startswith(prefix)})
    accuracies = [
        (name.removeprefix(prefix), history.evaluated(name), f"evaluation.{name}") for name in names
    ]
    metrics = [(task, f"mismatch_mean/{task}") for _, task in tasks]
    mismatches = [(task, history.metric(metric), f"step.{metric}") for task, metric in metrics]

    def lines(curves: list[tuple[str, list[tuple[float, float]], str]]) -> tuple[Series, ...]:
        return tuple(
            Series(task, points, colour, figure=figure)
            for colour, (task, points, figure) in enumerate(curves[:TASKS_MAX], start=1)
        )

    return [
        Chart("Reward by task", lines(rewards), "mean of a step's trajectories"),
        Chart("Held-out accuracy by task", lines(accuracies), _sampled_name(history), high=1.0),
        Chart("Mismatch of engine and trainer", lines(mismatches), MISMATCH_NOTE, ".1e"),
    ]


def mechanics(history: RunHistory) -> list[Chart]:
    def line_chart(
        title: str, metric: str, note: str, form: str = ".3f", low: float | None = None
    ) -> Chart:
        return Chart(title, (_of_steps(history, title, metric),), note, form, low)

    lag = (
        _of_steps(history, "at finish, mean", "lag_finish_mean"),
        _of_steps(history, "at finish, largest", "lag_finish_max", 1, True),
        _of_steps(history, "when trained, mean", "lag_consumed_mean", 2),
        _of_steps(history, "when trained, largest", "lag_consumed_max", 2, True),
    )
    seconds = (
        _of_steps(history, "whole step", "seconds"),
        _of_steps(history, "waiting for trajectories", "wait_s", 2),
        _of_steps(history, "busy", "busy_s", 3, True),
    )
    share = "share of the variance of the returns that the critic's values know"
    critic = (
        line_chart("Value loss", "value_loss", "of the critic, per action"),
        line_chart("Explained variance", "explained_variance", share, ".2f"),
    )
    return [
        Chart("Lag", lag, "steps between a token's version and the trainer's", ".1f"),
        Chart("Seconds per step", seconds, "the trainer's clock", ".2f"),
        line_chart("Loss", "loss", "of the policy gradient"),
        line_chart("Entropy", "entropy", "nats per generated token", low=0.0),
        line_chart(
            "KL estimate", "kl", "of the policy from the one that generated the tokens", ".4f"
        ),
        line_chart(
            "Effective sample size", "ess", "share that the importance weights leave", ".2f", 0.0
        ),
        line_chart("Gradient norm", "gradient_norm", "before clipping", ".3g", 0.0),
        line_chart("Tokens trained", "tokens_trained", "in a step", ".0f", 0.0),
        *(critic if history.metric("value_loss") else ()),
    ]


def draft_charts(passes: Sequence[PassDrafts]) -> list[Chart]:
    """Returns two charts over the passes with a line per task: the accepted share of draft tokens,
    and the tokens per forward pass. A single pass gives no charts.
    """
    if len({drafts.number for drafts in passes}) < 2:
        return []
    tasks = sorted({drafts.task for drafts in passes})[:TASKS_MAX]

    def lines(figure: str) -> tuple[Series, ...]:
        return tuple(
            Series(
                task,
                [
                    (float(drafts.number or 0), value)
                    for drafts in passes
                    if drafts.task == task
                    and (value := getattr(drafts.guesses, figure)) is not None
                ],
                colour,
            )
            for colour, task in enumerate(tasks, start=1)
        )

    by = "by pass over the prompts"
    return [
        Chart(
            "Accepted drafts",
            lines("acceptance"),
            f"share of draft tokens, {by}",
            ".0%",
            high=1.0,
            along="pass",
        ),
        Chart(
            "Tokens per step",
            lines("per_step"),
            f"per row and forward pass, {by}",
            ".1f",
            along="pass",
        ),
    ]


def _shares(history: RunHistory) -> tuple[Series, ...]:
    lines = sorted(
        (line for line in history.evaluations if line.get("shares")), key=lambda line: line["step"]
    )
    if not lines:
        return ()
    last: dict[str, float] = lines[-1]["shares"]
    names = sorted(
        {name for line in lines for name in line["shares"]}, key=lambda n: -last.get(n, 0.0)
    )
    # The largest share in the last evaluation is first; of more than four styles all but three are
    # "others".
    shown = names if len(names) <= 4 else names[:3]
    series = [
        Series(
            name,
            [(float(line["step"]), float(line["shares"].get(name, 0.0))) for line in lines],
            number,
        )
        for number, name in enumerate(shown, start=1)
    ]
    if len(names) > 4:
        rest = [
            (float(line["step"]), sum(line["shares"].get(n, 0.0) for n in names[3:]))
            for line in lines
        ]
        series.append(Series("others", rest, 4))
    return tuple(series)


def metric_chart(history: RunHistory, metric: str) -> Chart:
    """Returns the curve of a metric of the steps that has no card of its own."""
    # A user's loss may report any name, which has no definition here.
    figure = f"step.{metric}" if f"step.{metric}" in FIGURES else ""
    series = Series(metric, history.metric(metric), figure=figure)
    return Chart(metric, (series,), "a metric of the steps", ".4g", None)


def other_metrics(history: RunHistory) -> list[str]:
    """Returns the names of the metrics that the sheet does not draw."""
    drawn = {
        line.figure for chart in (*_learning(history), *mechanics(history)) for line in chart.series
    }
    names = {name for done in history.steps.values() for name in done.metrics}
    return sorted(name for name in names if f"step.{name}" not in drawn)


def _warnings(history: RunHistory) -> list[PageElement]:
    rows = [(warning.what, warning.do) for warning in history.concerns]
    content = table(["warning", "advice"], rows)
    return [card("Warnings", "of the run's last steps", content)] if rows else []


def _timeline(history: RunHistory, detail: Detail) -> list[PageElement]:
    drawn = draw_timeline(history, detail.marks)
    if drawn is None:
        return []
    more = len(history.rollouts) - ROWS_MAX
    most = marks_per_row(len(history.rollouts), detail.marks)
    note = "darker is a newer version (lighter on a dark page); in gaps the rollout was idle"
    if any(1 < len(rollout.serving) <= most for rollout in history.rollouts.values()):
        note += "; a green mark is a weight update"
    note += "; an arrow is a move of requests" if history.moves else ""
    if any(len(rollout.serving) > most for rollout in history.rollouts.values()):
        note += "; where bars are too many, each place shows its newest version"
    if len(history.moves) > detail.marks // 4:
        note += f"; the newest {detail.marks // 4} of {len(history.moves)} moves are drawn"
    note += f"; {more} more rollouts are not drawn" if more > 0 else ""
    return [card("Rollouts by version", note, scrolled("wide", "timeline", drawn))]


def _outcomes(history: RunHistory, base: str) -> PageElement:
    counts, admitted = history.outcomes, history.outcomes["admitted"]
    # The admitted groups must equal the ended and open ones (invariant 1), so all counts together
    # are twice the admitted ones.
    adds = "they add up" if sum(counts.values()) == 2 * admitted else "THEY DO NOT ADD UP"
    if history.is_tail:
        adds += "; without the run's first records, which were truncated and not archived"
    links = ["", *(f"{base}/groups?ended={name}" if base else "" for name in [*counts][1:])]
    rows: list[tuple[Node | int, ...]] = [
        (
            defined_label(name, f"run.groups_{name}"),
            element("span", named(f"run.groups_{name}"), linked(group_digits(count), link)),
            element("span", {}, f"{count / admitted:.1%}" if admitted else "–"),
        )
        for (name, count), link in zip(counts.items(), links, strict=True)
    ]
    content: list[Node] = [table(["ended", "groups", "share"], rows)]
    if history.finishes:
        names = list(history.finishes)
        figures = [f"run.trajectories_{name}" for name in names]
        content.append(table(names, [list(history.finishes.values())], figures))
    if history.reasons:
        content.append(table(["why not trained", "times"], history.reasons))
    return card("Every admitted group has one ending", f"groups; {adds}", *content)


def _tasks(history: RunHistory, base: str) -> list[PageElement]:
    if len(history.tasks) < 2:
        return []
    names = ("trajectories", "reward_mean", "tokens_mean")
    figures = ["", *(f"task.{name}" for name in names)]
    rows = [
        (row["task"], row["trajectories"], _figure(row["reward_mean"], ".2f"),
         _figure(row["tokens_mean"], ".3g"))
        for row in history.tasks
    ]  # fmt: skip
    head = ["task", *(figure_of(name).label for name in figures[1:])]
    links = [f"{base}/search?task={quote(row[0])}" if base else "" for row in rows]
    return [card("Tasks", "", table(head, rows, figures, links))]


def _dropped(history: RunHistory) -> list[PageElement]:
    drops = history.dropped
    if not drops.dropped:
        return []
    head = ["", "answers", "median length", "median reward"]
    rows = [
        ("dropped", drops.dropped, _figure(drops.length_dropped), _figure(drops.reward_dropped)),
        ("trained", drops.trained, _figure(drops.length_trained), _figure(drops.reward_trained)),
    ]
    figures = ["", "fate.answers", "fate.length_median", "fate.reward_median"]
    note = "above max_lag, or at a deadline; a bias if the two rows differ"
    return [card("Samples dropped for their age", note, table(head, rows, figures))]


def draft_table(passes: Sequence[PassDrafts]) -> list[PageElement]:
    if not passes:
        return []
    head = ["pass", "task", "tokens", "per step", "drafted", "accepted", "found", "look-up"]
    rows = [
        (
            str(drafts.number),
            drafts.task,
            drafts.guesses.tokens,
            f"{drafts.guesses.per_step:.2f}",
            drafts.guesses.guessed,
            _figure(drafts.guesses.acceptance, ".0%"),
            _figure(drafts.guesses.hit_rate, ".0%"),
            "–" if drafts.guesses.lookup_us is None else f"{drafts.guesses.lookup_us:.0f} µs",
        )
        for drafts in passes[-PASSES_MAX:]
    ]
    note = "draft tokens and their accepted share; share of look-ups that found a draft"
    if len(passes) > PASSES_MAX:
        note += f"; the last {PASSES_MAX} of {len(passes)} lines"
    return [card("Drafts", note, table(head, rows))]


def _figure(value: float | None, form: str = "g") -> str:
    return "–" if value is None else format(value, form)


def _rollouts(history: RunHistory, summary: RunSummary, detail: Detail) -> list[PageElement]:
    if not history.rollouts:
        return []
    shown = nlargest(detail.lines, history.rollouts.items(), key=lambda pair: pair[1].tokens)
    rows = [
        (
            name,
            rollout.trajectories,
            rollout.tokens,
            rollout.cut,
            rollout.dead,
            len({served.version for served in rollout.serving}),
            f"{rollout.idle_s:.1f} s ({summary.idle_share.get(name, 0.0):.0%})",
        )
        for name, rollout in sorted(shown)
    ]
    figures = ["", *(f"rollout.{name}" for name in ROLLOUT_FIGURES)]
    head = ["rollout", *(figure_of(name).label for name in figures[1:])]
    figures[-1] = "rollout.idle_s rollout.idle_share"
    content: list[Node] = [table(head, rows, figures)]
    if history.live is not None:
        content.append(_present(history, [name for name, *_ in rows]))
    omitted = len(history.rollouts) - len(rows)
    note = f"{omitted} more with fewer tokens are not listed" if omitted else ""
    return [card("Rollouts", note, *content)]


def _present(history: RunHistory, names: Sequence[str]) -> PageElement:
    beats = history.state.rollouts
    rows = [
        (name, beat.health, f"{beat.running} of {beat.slots}", f"v{beat.version.number}",
         group_digits(beat.tokens_per_s))
        for name in names
        if name in beats and (beat := beats[name][-1])
    ]  # fmt: skip
    figures = ["", "", "rollout.running rollout.slots", "rollout.version", "rollout.tokens_per_s"]
    return table(
        ["at the last heartbeat", "state", "running", "version", "tokens/s"], rows, figures
    )


def _restarts(history: RunHistory, detail: Detail) -> list[PageElement]:
    deaths, restarts = history.deaths(), history.state.restarts()
    worst = nlargest(detail.lines, restarts.items(), key=lambda pair: pair[1])
    content: list[Node] = []
    if worst:
        content.append(table(["role", "restarts"], sorted(worst), ["", "role.restarts"]))
    if deaths:
        first_s = min(float(event["time_s"]) for event in history.events)
        content.append(_deaths(deaths, first_s))
    note = "terms after the first of each role"
    return [card("Restarts", note, *content)] if content else []


def _deaths(deaths: Sequence[Mapping[str, Any]], first_s: float) -> PageElement:
    rows = [
        (
            clock(float(event["time_s"]) - first_s),
            str(event["role"]),
            describe_exit(int(event["code"])),
        )
        for event in deaths[-50:]
    ]
    return table(["since the run's start", "died", "ended with"], rows)


def _configuration(history: RunHistory) -> list[PageElement]:
    if not history.configuration:
        return []
    rows = [
        (key, printable_value(key, value, json.dumps))
        for key, value in history.configuration.items()
    ]
    return [folded("Configuration", table(["setting", "value"], rows))]
