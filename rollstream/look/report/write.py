"""Writes `report.html` from a run's history and summary, section by section; one without data is
left out.
"""

import json
from collections.abc import Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any

from rollstream.look.figures.definitions import figure_of
from rollstream.look.monitor.format import clock
from rollstream.look.monitor.samples import PassDrafts
from rollstream.look.report import page
from rollstream.look.report.comparison import tasks_of
from rollstream.look.report.history import RunHistory
from rollstream.look.report.page import Chart, Series, Tile
from rollstream.look.report.summary import (
    ACCURACY_GOAL,
    PACED_NOTE,
    PASS_AT,
    MetricChange,
    RunSummary,
    pass_changes,
)
from rollstream.look.report.timeline import MARKS_MAX, ROWS_MAX, draw_timeline
from rollstream.look.report.untrained import episode_card
from rollstream.run.supervisor.process import describe_exit

# The page has as many distinct colours.
TASKS_MAX = 8
# Columns of the table of rollouts.
ROLLOUT_FIGURES = ("trajectories", "tokens", "cut", "dead", "versions", "idle_s")
# Lines of the table of drafts, one per task and pass over the prompts.
PASSES_MAX = 64
# Of the tables of rollouts and of restarts.
LINES_MAX = 200
# The note of the chart that compares log-probabilities of engine and trainer (the mismatch).
MISMATCH_NOTE = (
    "mean |Δ log p| in nats, same tokens and version; steps without such tokens are left out"
)


EXPORT_FOLDER = "explorer"
EXPORT_LINK = (
    f'<p class="soft"><a href="{EXPORT_FOLDER}/index.html">Explore steps, groups and every token'
    "</a>, from a file host</p>"
)


def write_report(
    history: RunHistory,
    summary: RunSummary,
    path: Path,
    learning: Sequence[str] = (),
    is_typed: bool = False,
) -> None:
    """Write the report to `path` (`output_file`), with the cards `learning` and a link to the
    explorer's static export, if one is in `EXPORT_FOLDER` beside it. With `is_typed` the user typed
    the path, so links are followed.
    """
    has_export = (path.parent / EXPORT_FOLDER / "index.html").is_file()
    page.write_page(report_page(history, summary, has_export, learning), path, is_typed)


def report_page(
    history: RunHistory,
    summary: RunSummary,
    has_export: bool = False,
    learning: Sequence[str] = (),
) -> str:
    name = summary.run or "run"
    line = f"seed {summary.seed} · step {summary.steps} of {summary.steps_wanted} · "
    if summary.forked_from:
        line = f"forked from {summary.forked_from} · {line}"
    if summary.is_paced:
        line = f"{PACED_NOTE} · {line}"
    body = [
        page.heading(name, line + clock(summary.seconds)),
        EXPORT_LINK if has_export else "",
        page.tiles(_tiles(summary)),
        _warnings(history),
        page.charts(_learning(history)),
        page.charts(_by_task(history)),
        *learning,
        _timeline(history),
        page.charts([*_mechanics(history), *draft_charts(history.drafts)]),
        _outcomes(history),
        _dropped(history),
        episode_card(history.episodes),
        draft_table(history.drafts),
        _rollouts(history, summary),
        _restarts(history),
        _configuration(history),
    ]
    return page.page(f"{name} · seed {summary.seed} · Rollstream", [part for part in body if part])


def _tiles(summary: RunSummary) -> list[Tile]:
    def change(name: str, change: MetricChange, label: str = "") -> Tile:
        return Tile(f"{name} {name}", change.text(".2f"), "first last", label)

    shown: list[Tile] = []
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
    if summary.tokens_per_s is not None:
        shown.append(Tile("run.tokens_per_s", page.group_digits(summary.tokens_per_s)))
    if summary.lag_consumed_mean is not None:
        mean, largest = summary.lag_consumed_mean, summary.lag_consumed_max
        label, text = "mean and largest lag when trained", f"{mean:.2f} · {largest:.0f}"
        shown.append(Tile("run.lag_consumed_mean run.lag_consumed_max", text, label=label))
    return [*shown, Tile("run.restarts", str(summary.restarts))]


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


def _mechanics(history: RunHistory) -> list[Chart]:
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


def _warnings(history: RunHistory) -> str:
    rows = [(warning.what, warning.do) for warning in history.concerns]
    content = page.table(["warning", "advice"], rows)
    return page.wide("Warnings", "of the run's last steps", content) if rows else ""


def _timeline(history: RunHistory) -> str:
    drawn = draw_timeline(history)
    more = len(history.rollouts) - ROWS_MAX
    note = "darker is a newer version (lighter on a dark page); in gaps the rollout was idle"
    if any(1 < len(rollout.serving) <= MARKS_MAX for rollout in history.rollouts.values()):
        note += "; a green mark is a weight update"
    note += "; an arrow is a move of requests" if history.moves else ""
    note += f"; {more} more rollouts are not drawn" if more > 0 else ""
    return page.wide("Rollouts by version", note, drawn) if drawn else ""


def _outcomes(history: RunHistory) -> str:
    counts = history.outcomes
    # The admitted groups must equal the ended and open ones (invariant 1), so all counts together
    # are twice the admitted ones.
    adds = "they add up" if sum(counts.values()) == 2 * counts["admitted"] else "THEY DO NOT ADD UP"
    if history.is_tail:
        adds += "; without the run's first records, which were truncated and not archived"
    figures = [f"run.groups_{name}" for name in counts]
    content = page.table(list(counts), [list(counts.values())], figures)
    if history.reasons:
        content += page.table(["why not trained", "times"], history.reasons)
    return page.wide("Every admitted group has one ending", f"groups; {adds}", content)


def _dropped(history: RunHistory) -> str:
    drops = history.dropped
    if not drops.dropped:
        return ""
    head = ["", "answers", "median length", "median reward"]
    rows = [
        ("dropped", drops.dropped, _figure(drops.length_dropped), _figure(drops.reward_dropped)),
        ("trained", drops.trained, _figure(drops.length_trained), _figure(drops.reward_trained)),
    ]
    figures = ["", "fate.answers", "fate.length_median", "fate.reward_median"]
    note = "above max_lag, or at a deadline; a bias if the two rows differ"
    return page.wide("Samples dropped for their age", note, page.table(head, rows, figures))


def draft_table(passes: Sequence[PassDrafts]) -> str:
    if not passes:
        return ""
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
    return page.wide("Drafts", note, page.table(head, rows))


def _figure(value: float | None, form: str = "g") -> str:
    return "–" if value is None else format(value, form)


def _rollouts(history: RunHistory, summary: RunSummary) -> str:
    if not history.rollouts:
        return ""
    shown = nlargest(LINES_MAX, history.rollouts.items(), key=lambda pair: pair[1].tokens)
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
    omitted = len(history.rollouts) - len(rows)
    note = f"{omitted} more with fewer tokens are not listed" if omitted else ""
    figures[-1] = "rollout.idle_s rollout.idle_share"
    return page.wide("Rollouts", note, page.table(head, rows, figures))


def _restarts(history: RunHistory) -> str:
    deaths, restarts = history.deaths(), history.state.restarts()
    worst = nlargest(LINES_MAX, restarts.items(), key=lambda pair: pair[1])
    figures = ["", "role.restarts"]
    content = page.table(["role", "restarts"], sorted(worst), figures) if worst else ""
    if deaths:
        content += _deaths(deaths, min(float(event["time_s"]) for event in history.events))
    return page.wide("Restarts", "terms after the first of each role", content) if content else ""


def _deaths(deaths: Sequence[Mapping[str, Any]], first_s: float) -> str:
    rows = [
        (
            clock(float(event["time_s"]) - first_s),
            str(event["role"]),
            describe_exit(int(event["code"])),
        )
        for event in deaths[-50:]
    ]
    return page.table(["since the run's start", "died", "ended with"], rows)


def _configuration(history: RunHistory) -> str:
    if not history.configuration:
        return ""
    rows = [(key, json.dumps(value)) for key, value in history.configuration.items()]
    return page.folded("Configuration", page.table(["setting", "value"], rows))
