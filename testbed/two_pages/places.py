"""Reads all places of a finished run (`numbers_of_run`): report, live view, explorer's answers,
views, `ls` and `audit`; `scraped_numbers` those of `/metrics`, as long as the run lives.
"""

import contextlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.look.report.elements import Node, PageElement, html_of
from rollstream.run.cli.main import main
from testbed.explorer_server import ServedRuns, serving
from testbed.two_pages import named_paths
from testbed.two_pages.named_paths import named_numbers
from testbed.two_pages.named_words import FRAME, SUMMARY, ReportPage, named_words
from testbed.two_pages.shown import ShownNumber, resolved
from testbed.waiting import wait_for

GROUPS_SHOWN = 500
# A row of a frame: its name has 11 columns, and a line that continues it none.
FRAME_ROW = re.compile(r"^│ (?P<name>.{11})(?P<words>.*?) *│$")
OF_PART = "of the log's last part"
FRAME_COLUMNS = "139"  # the most that has figures and rollouts below each other
VIEWS: Mapping[str, str] = {
    "steps": "SELECT step, unnest(map_entries(metrics), recursive := true) FROM steps",
    "counts": "SELECT step, unnest(map_entries(counts), recursive := true) FROM steps",
    "takes": "SELECT step, takes FROM steps",
    "groups": "SELECT ended AS key, count(*) AS value FROM groups GROUP BY ALL",
    "admitted": "SELECT 'admitted' AS key, count(*) AS value FROM groups",
    "one_group": 'SELECT "group", wave, step, trajectories AS samples FROM groups',
    "rewarded": 'SELECT "group", avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std, '
    "avg(tokens) AS tokens_mean, count(*) AS finished FROM rewards GROUP BY ALL",
    "lag": "SELECT step, lag, tokens, trajectories FROM lag",
    "lags": "SELECT lag, sum(tokens)::BIGINT AS tokens FROM lag GROUP BY ALL",
    "finishes": "SELECT finish AS key, count(*) AS value FROM completions GROUP BY ALL",
    "completions": "SELECT count(*) AS trajectories FROM completions",
    "rollouts": "SELECT rollout, count(*) AS trajectories, sum(tokens)::BIGINT AS tokens, "
    "count(*) FILTER (finish = 'length') AS cut, count(*) FILTER (finish = 'dead') AS dead "
    "FROM rewards GROUP BY ALL",
    "served": "SELECT rollout, count(DISTINCT version.number) AS versions FROM applied "
    "WHERE NOT void AND reason IS NULL AND schema = 'applied/1' GROUP BY ALL",
    "answers": "SELECT rollout, count(*) AS answers, sum(tokens)::BIGINT AS answer_tokens "
    "FROM rewards WHERE finish != 'dead' GROUP BY ALL",
    "tasks": "SELECT task, count(*) AS trajectories, avg(reward) AS reward_mean, "
    "avg(tokens) FILTER (finish != 'dead') AS tokens_mean FROM rewards GROUP BY ALL",
    "trajectories": "SELECT trajectory, reward, tokens, moves FROM rewards",
    "lag_finish": "SELECT trajectory, max(lag_finish) AS lag_finish, "
    "max(lag_consumed) AS lag_consumed, max(step) AS step FROM spans GROUP BY ALL",
    "fates": "SELECT fate, count(*) FILTER (finished) AS answers, "
    "median(tokens) FILTER (finished) AS length_median, "
    "median(reward) FILTER (finished) AS reward_median FROM fates "
    "WHERE fate IN ('trained', 'dropped') GROUP BY ALL",
    "all_fates": "SELECT fate, count(*) AS trajectories FROM fates GROUP BY ALL",
    "released": "SELECT count(*) AS samples_released FROM fates WHERE fate = 'released'",
    "run": "SELECT count(*) AS steps, max(step) AS version, sum(tokens_trained) AS tokens_trained, "
    "avg(lag_consumed_mean) AS lag_consumed_mean, max(lag_consumed_max) AS lag_consumed_max "
    "FROM steps",
    "evaluations": "SELECT * EXCLUDE (line, shares, prompts, by_prompt, seconds) FROM evaluations",
}
"""What the views say, by the name of their question."""
STEP_ENTRIES = ("steps", "counts")
OF: Mapping[str, str] = {
    "takes": "step", "one_group": "group", "rewarded": "group", "rollouts": "rollout",
    "served": "rollout", "answers": "rollout", "tasks": "task", "trajectories": "trajectory",
    "lag_finish": "trajectory", "fates": "fate", "all_fates": "fate", "evaluations": "evaluation",
}  # fmt: skip
"""The subject of a question's columns, where it is not the run."""


def numbers_of_run(folder: Path) -> list[ShownNumber]:
    """Returns the numbers of all places of a run that is over."""
    with QuerySession(locate_run(str(folder)), lambda text: None) as session:
        views = list(_view_numbers(session))
    ends = _ends(views)
    shown = [*views, *_report_numbers(folder), *_top_numbers(folder), *_other_numbers(folder)]
    with serving([str(folder)]) as served:
        shown += _explorer_numbers(served)
    return list(resolved(shown, ends))


def ends_of_run(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the first and the last step or version that has each figure."""
    with QuerySession(locate_run(str(folder)), lambda text: None) as session:
        return _ends(_view_numbers(session))


def printed(*words: str) -> str:
    """Returns what a command prints."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = FRAME_COLUMNS
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            main(list(words))
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return output.getvalue()


def _ends(views: Iterable[ShownNumber]) -> dict[str, tuple[str, str]]:
    steps: dict[str, list[int]] = {}
    for one in views:
        if one.figure.startswith(("step.", "evaluation.")) and one.of.isdigit():
            steps.setdefault(one.figure, []).append(int(one.of))
    return {figure: (str(min(at)), str(max(at))) for figure, at in steps.items()}


def _view_numbers(session: QuerySession) -> Iterator[ShownNumber]:
    for question, sql in VIEWS.items():
        answer = session.answer(sql)
        for row in (row for batch in answer.batches for row in batch):
            named = dict(zip(answer.names, row, strict=True))
            yield from _row_numbers(f"query {question}", question, named)


def _row_numbers(place: str, question: str, row: Mapping[str, Any]) -> Iterator[ShownNumber]:
    if question in STEP_ENTRIES:
        yield from _number(place, row["key"], f"step.{row['key']}", str(row["step"]), row["value"])
    elif question in ("groups", "admitted"):
        yield from _number(place, row["key"], f"run.groups_{row['key']}", "", row["value"])
    elif question == "finishes":
        yield from _number(place, row["key"], f"run.trajectories_{row['key']}", "", row["value"])
    elif question == "lag":
        of = f"{row['step']} lag {row['lag']}"
        yield from _number(place, "tokens", "step.lag_tokens", of, row["tokens"])
        yield from _number(place, "trajectories", "step.lag_trajectories", of, row["trajectories"])
    elif question == "lags":
        yield from _number(place, "tokens", "run.lag_tokens", f"lag {row['lag']}", row["tokens"])
    else:
        subject = OF.get(question, "run")
        key = "step" if subject == "evaluation" else subject
        of = "" if subject == "run" else str(row[key])
        for name, value in row.items():
            if name != key:
                yield from _number(place, name, f"{subject}.{name}", of, value)


def _number(place: str, where: str, figure: str, of: str, value: Any) -> Iterator[ShownNumber]:
    if isinstance(value, int | float) and value == value:
        yield ShownNumber(place, where, figure, of, float(value))


def _report_numbers(folder: Path) -> Iterator[ShownNumber]:
    line = json.loads(printed("report", str(folder), "--json"))
    yield from named_numbers("report --json", line, named_paths.REPORT)
    page = ReportPage()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    yield from page.shown
    for row in printed("report", str(folder)).splitlines()[1:]:
        name, separator, words = row.partition("\t")
        if separator and name.strip():
            yield from named_words("report", name.strip(), words.strip(), SUMMARY)


def _top_numbers(folder: Path) -> Iterator[ShownNumber]:
    shown = json.loads(printed("top", str(folder), "--once", "--json"))
    # The live view reads the log, and says so where its begin was truncated.
    is_part: bool = shown["outcomes"]["is_tail"]
    part = named_paths.TOP_OF_PART if is_part else dict[str, str]()
    yield from named_numbers("top --json", shown, {**named_paths.TOP, **part})
    yield from frame_numbers(printed("top", str(folder), "--once"))


def frame_numbers(frame: str) -> Iterator[ShownNumber]:
    """Yields the numbers of a frame's rows of figures; its table of rollouts is in the JSON too."""
    rows: list[tuple[str, str]] = []
    for line in frame.splitlines():
        if match := FRAME_ROW.match(line):
            name, words = match["name"].strip(), match["words"].strip()
            if name.startswith("step "):
                name, words = "step", line.strip("│ ").removeprefix("step ")
            if name:
                rows.append((name, words))
            elif rows and words:
                rows[-1] = (rows[-1][0], f"{rows[-1][1]} · {words}")
        elif line.startswith("╰"):
            rows.append(("below", line.strip("╰─╯ ")))
    for name, words in rows:
        if name in FRAME and not words.endswith(OF_PART):
            yield from named_words("top", name, words, FRAME)


def _other_numbers(folder: Path) -> Iterator[ShownNumber]:
    yield from named_numbers(
        "ls --json", json.loads(printed("ls", str(folder), "--json")), named_paths.LS
    )
    audit = json.loads(printed("audit", str(folder), "--json"))
    for result in audit["invariants"]:
        names = {1: named_paths.AUDIT_1, 2: named_paths.AUDIT_2}.get(result["invariant"])
        if names is not None:
            yield from named_numbers("audit --json", result["counts"], names)


def _explorer_numbers(served: ServedRuns) -> Iterator[ShownNumber]:
    (run,) = served.explorer.runs
    wait_for(lambda: run.snapshot is not None)
    sheet = ReportPage("explorer sheet")
    sheet.feed(html_of(*map(_element, served.json("r/0/sheet")["parts"])))
    yield from sheet.shown
    steps = served.json("r/0/steps?limit=500")
    yield from named_numbers("explorer steps", steps, named_paths.STEPS)
    for step in (one["step"] for one in steps["steps"]):
        answer = served.json(f"r/0/steps/{step}")
        lags = [{"step": step, **lag} for lag in answer["lags"]]
        yield from named_numbers("explorer step", answer | {"lags": lags}, named_paths.ONE_STEP)
    groups = served.json(f"r/0/groups?limit={GROUPS_SHOWN}")
    yield from named_numbers("explorer groups", groups, named_paths.GROUPS)
    yield from named_numbers(
        "explorer search", served.json("r/0/search?limit=200"), named_paths.SEARCH
    )
    questions = served.json("r/0/questions")
    yield from named_numbers("explorer questions", questions, named_paths.QUESTIONS)
    yield from _endings(questions["endings"])


def _element(node: Any) -> Node:
    if isinstance(node, str):
        return node
    tag, attributes, children = node
    return PageElement(tag, attributes, tuple(map(_element, children)))


def _endings(rows: Sequence[Mapping[str, Any]]) -> Iterator[ShownNumber]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[row["ended"]] = sums.get(row["ended"], 0) + row["groups"]
    for ended, groups in sums.items():
        yield ShownNumber("explorer questions", "endings", f"run.groups_{ended}", "", groups)


def scraped_numbers(
    series: Mapping[str, Sequence[tuple[Mapping[str, str], float]]],
) -> Iterator[ShownNumber]:
    """Yields the numbers of one scrape of a process that the metrics share with other places."""
    for name, samples in series.items():
        short = name.removeprefix("rollstream_")
        for labels, value in samples:
            metric = labels.get("metric")
            answer = {f"{short}/{metric}" if metric else short: value}
            names = {**named_paths.METRICS, "**": named_paths.OWN}
            yield from named_numbers("/metrics", answer, names)
