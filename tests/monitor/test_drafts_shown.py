"""Drafts in `top` and in the report: by pass over the prompts and by task, and only where there are
any.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import msgspec
import numpy as np

from rollstream.look.monitor.snapshot import take_snapshot
from rollstream.look.monitor.state import RunState
from rollstream.look.report.history import history_of
from rollstream.look.report.summary import summarise
from rollstream.streams.records import Prompt, Trajectory
from rollstream.streams.values import Drafts, Sampling
from tests.index.indexed_records import index_of
from tests.report.report_html import report_html
from tests.support import planted_states as planted
from tests.support.planted_states import drawn

PROMPTS = 3


def drafted(group: int, task: str = "remainder", index: int = 0, right: int = 9) -> Trajectory:
    """30 tokens in 12 steps of the prompt that repeats every third group."""
    prompt = np.full(4, group % PROMPTS, np.uint32)
    return planted.finished(
        group,
        index,
        1.0,
        tokens=np.concatenate((prompt, np.zeros(planted.LENGTH, np.uint32))),
        task=task,
        drafts=Drafts((1, right, 29 - right), 12, 10, 4, 3, 0.00004),
    )


def prompt(group: int) -> Prompt:
    tokens = np.full(4, group % PROMPTS, np.uint32)
    return Prompt(group, "remainder", tokens, 8, Sampling(), 0, "", group // PROMPTS)


def run_of_passes(groups: int, tasks: tuple[str, ...] = ("remainder",)) -> Iterator[Trajectory]:
    """Drafts of the first pass have five accepted tokens of ten, of later ones nine."""
    for group in range(groups):
        right = 5 if group < PROMPTS else 9
        yield drafted(group, tasks[group % len(tasks)], right=right)


def shown(state: RunState) -> str:
    text = drawn(take_snapshot(state, planted.plan(), planted.NOW_S), 120, 60)
    return " ".join(text.split())


def test_top_shows_acceptance_by_pass():
    state = planted.plan().state()
    for record in run_of_passes(2 * PROMPTS):
        state.apply(prompt(record.group), planted.NOW_S)
        state.apply(record, planted.NOW_S)
    text = shown(state)
    assert "pass 2 90% accepted, 2.5 tokens a step" in text
    assert "75% found in 10 µs each" in text
    assert "0.03 rejected per token" in text
    assert "pass 1 50% accepted, 2.5 tokens a step" in text


def test_passes_are_those_of_the_prompts():
    state = planted.plan().state()
    for group in (4, 700):
        state.apply(prompt(group), planted.NOW_S)
        state.apply(drafted(group), planted.NOW_S)
    state.apply(drafted(9000), planted.NOW_S)  # its prompt is not kept any more
    at = take_snapshot(state, planted.plan(), planted.NOW_S)
    assert [one.number for one in at.drafts] == [234, 2, None]
    reported = msgspec.json.decode(msgspec.json.encode(at))["drafts"][0]
    assert reported["guesses"]["guessed"] == 10
    assert reported["task"] == "remainder"


def test_without_drafts_nothing_of_them_is_shown():
    state = planted.healthy()
    assert "drafts" not in shown(state)
    with index_of(planted.finished(1, 0, 1.0)) as index:
        history = history_of(index)
    assert "Drafts" not in report_html(history, summarise(history))


def test_what_is_known_of_passes_is_bounded():
    state = planted.plan().state()
    for group in range(9000):
        state.apply(prompt(group), planted.NOW_S)
    assert len(state.epochs) == 4096
    assert max(state.epochs) == 8999


def test_the_report_has_a_line_per_pass_and_task():
    records = [*run_of_passes(4 * PROMPTS, ("long", "short"))]
    with index_of(*records, *records) as index:  # second completions do not count
        history = history_of(index)
    text = report_html(history, summarise(history))
    assert "Accepted drafts" in text
    assert "Tokens per step" in text
    rows = re.findall(r"<tr>(.*?)</tr>", text[text.index("<h2>Drafts</h2>") :])
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    table = [row for row in cells if len(row) == 8]
    assert table[0] == [
        "pass",
        "task",
        "tokens",
        "per step",
        "drafted",
        "accepted",
        "found",
        "look-up",
    ]
    assert len(table) == 1 + 4 * 2
    assert table[1][:2] == ["1", "long"]
    assert table[1][5] == "50%"
    assert table[-1][:2] == ["4", "short"]
    assert table[-1][3:] == ["2.50", "10" if table[-1][2] == "30" else "20", "90%", "75%", "10 µs"]
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert re.search(r'data-name="long" data-x="1 2 3 4" data-y="[^"]* 0.9"', text)


def test_one_pass_has_a_table_and_no_plot():
    with index_of(*run_of_passes(PROMPTS)) as index:
        history = history_of(index)
    text = report_html(history, summarise(history))
    assert "<h2>Drafts</h2>" in text
    assert "Accepted drafts" not in text
