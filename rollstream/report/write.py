"""Writes `report.html` from a run's history and summary, section by section; one without data is
left out.
"""

import json
from collections.abc import Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any

from rollstream.monitor.format import clock
from rollstream.monitor.samples import PassDrafts
from rollstream.report import page
from rollstream.report.comparison import tasks_of
from rollstream.report.history import RunHistory
from rollstream.report.page import Chart, Series
from rollstream.report.summary import (
    ACCURACY_GOAL,
    PACED_NOTE,
    PASS_AT,
    RunSummary,
    pass_changes,
)
from rollstream.report.timeline import MARKS_MAX, ROWS_MAX, draw_timeline
from rollstream.report.untrained import episode_card
from rollstream.supervisor.process import describe_exit

# The page has as many distinct colours.
TASKS_MAX = 8
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


def _tiles(summary: RunSummary) -> list[tuple[str, str]]:
    figures: list[tuple[str, str]] = []
    if summary.accuracy_sampled:
        figures.append(("held-out accuracy, sampled", summary.accuracy_sampled.text(".2f")))
    figures += [
        (f"held-out, pass@{k}", change.text(".2f")) for k, change in summary.pass_at.items()
    ]
    if summary.evaluated_step is not None and summary.evaluated_step < summary.steps:
        figures.append(("evaluated up to version", str(summary.evaluated_step)))
    if summary.accuracy_greedy:
        figures.append(("held-out accuracy, greedy", summary.accuracy_greedy.text(".2f")))
    if summary.goal_s is not None:
        figures.append(
            (f"to {ACCURACY_GOAL} sampled (step {summary.goal_step})", clock(summary.goal_s))
        )
    if summary.tokens_per_s is not None:
        figures.append(("tokens trained per second", page.group_digits(summary.tokens_per_s)))
    if summary.lag_consumed_mean is not None:
        mean, largest = summary.lag_consumed_mean, summary.lag_consumed_max
        figures.append(("mean and largest lag when trained", f"{mean:.2f} · {largest:.0f}"))
    figures.append(("restarts", str(summary.restarts)))
    return figures


def _learning(history: RunHistory) -> list[Chart]:
    accuracy = (
        Series(_sampled_name(history), history.evaluated("accuracy_sampled"), 1),
        Series("greedy", history.evaluated("accuracy_greedy"), 2),
        *(
            Series(f"pass@{k}", history.evaluated(f"{PASS_AT}{k}"), number)
            for number, k in enumerate([*pass_changes(history)][-6:], start=3)
        ),
    )
    lengths = (
        Series("median", history.metric("length_median"), 1),
        Series("99th percentile", history.metric("length_p99"), 2),
    )
    reward = (Series("mean reward", history.metric("reward_mean"), 1),)
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


def _sampled_name(history: RunHistory) -> str:
    temperatures = sorted({float(line.get("temperature", 1.0)) for line in history.evaluations})
    return f"sampled (T = {', '.join(f'{temperature:g}' for temperature in temperatures) or 1})"


def _by_task(history: RunHistory) -> list[Chart]:
    rewards = [(task, history.metric(metric)) for metric, task in tasks_of(history)]
    prefix = "accuracy_sampled/"
    names = sorted({n for line in history.evaluations for n in line if n.startswith(prefix)})
    accuracies = [(name.removeprefix(prefix), history.evaluated(name)) for name in names]
    mismatches = [(task, history.metric(f"mismatch_mean/{task}")) for _, task in tasks_of(history)]

    def lines(curves: list[tuple[str, list[tuple[float, float]]]]) -> tuple[Series, ...]:
        shown = enumerate(curves[:TASKS_MAX], start=1)
        return tuple(Series(task, points, colour) for colour, (task, points) in shown)

    return [
        Chart(
            "Reward by task",
            lines(rewards if len(rewards) > 1 else []),
            "mean of a step's trajectories",
        ),
        Chart("Held-out accuracy by task", lines(accuracies), _sampled_name(history), high=1.0),
        Chart("Mismatch of engine and trainer", lines(mismatches), MISMATCH_NOTE, ".1e"),
    ]


def _mechanics(history: RunHistory) -> list[Chart]:
    def line_chart(
        title: str, metric: str, note: str, form: str = ".3f", low: float | None = None
    ) -> Chart:
        return Chart(title, (Series(title, history.metric(metric), 1),), note, form, low)

    lag = (
        Series("at finish, mean", history.metric("lag_finish_mean"), 1),
        Series("at finish, largest", history.metric("lag_finish_max"), 1, thin=True),
        Series("when trained, mean", history.metric("lag_consumed_mean"), 2),
        Series("when trained, largest", history.metric("lag_consumed_max"), 2, thin=True),
    )
    seconds = (
        Series("whole step", history.metric("seconds"), 1),
        Series("waiting for trajectories", history.metric("wait_s"), 2),
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
    content = page.table(list(counts), [list(counts.values())])
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
    note = "above max_lag, or at a deadline; a bias if the two rows differ"
    return page.wide("Samples dropped for their age", note, page.table(head, rows))


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
    head = ["rollout", "trajectories", "tokens", "cut at the limit", "dead", "versions", "idle"]
    omitted = len(history.rollouts) - len(rows)
    note = f"{omitted} more with fewer tokens are not listed" if omitted else ""
    return page.wide("Rollouts", note, page.table(head, rows))


def _restarts(history: RunHistory) -> str:
    deaths, restarts = history.deaths(), history.state.restarts()
    worst = nlargest(LINES_MAX, restarts.items(), key=lambda pair: pair[1])
    content = page.table(["role", "restarts"], sorted(worst)) if worst else ""
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
