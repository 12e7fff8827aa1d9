"""The views `fates`, `bias` and `pass_at_k` against counts by hand and recounts in plain Python."""

import json
import shutil
from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest

from rollstream.look.query.fate_views import QUANTILES
from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.streams.records import Admitted, GroupClosed, Take
from rollstream.streams.values import Address, GroupMembers, Member
from rollstream.streams.writer import FencedWriter, publish
from testbed.repository import EXAMPLES
from tests.analysis.asked_run import EVALUATION, open_log, trajectory


def rows_of(folder, sql):
    with QuerySession(locate_run(str(folder)), lambda text: None) as session:
        return [row for rows in session.answer(sql).batches for row in rows]


def test_every_admitted_trajectory_has_one_fate(asked):
    """Invariant 1, by trajectory: 3.0 died and 3.1 never finished."""
    fates = asked("SELECT trajectory, fate, finished, tokens_trained FROM fates ORDER BY ALL")
    assert fates == [
        ("0.0", "trained", True, 9),
        ("0.1", "trained", True, 9),
        ("1.0", "trained", True, 9),
        ("1.1", "trained", True, 9),
        ("2.0", "filtered", True, 0),
        ("2.1", "filtered", True, 0),
        ("3.0", "dead", False, 0),
        ("3.1", "open", False, 0),
    ]


@pytest.fixture(scope="module")
def dropped(folders, tmp_path_factory):
    """Beside the known groups: 4 expired with one answer, of 5 one answer was left out, 6 released
    one, and all tokens of 7.0 were too old (max_lag is 1).
    """
    folder = tmp_path_factory.mktemp("dropped") / "run"
    shutil.copytree(folders["live"], folder)
    bus = open_log(folder)
    dispatch = FencedWriter(bus, "admissions", "dispatch", 3)
    trainer = FencedWriter(bus, "ledger", "trainer", 3)
    dispatch.open()
    trainer.open()
    for group, count, needed in ((4, 2, 0), (5, 2, 0), (6, 3, 2), (7, 2, 0)):
        names = tuple(f"{group}.{index}" for index in range(count))
        admitted = Admitted(group, 2, names, 600.0, Address(0, group), needed=needed)
        dispatch.append([(str(group), admitted)])
    for group, index in ((4, 0), (5, 0), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1)):
        version = 1 if (group, index) == (7, 0) else 3
        reward = float(group == 5 or index)
        publish(
            bus, "trajectories", str(group), trajectory(group, index, ((0, 9, version),), reward)
        )
    used = {5: (0,), 6: (0, 1), 7: (0, 1)}
    for number, (group, indices) in enumerate(used.items()):
        named = tuple(Member(f"{group}.{i}", Address(1, i), "00") for i in indices)
        trainer.append([("run", Take(4, 0, number, named, (GroupMembers(group, named),)))])
    trainer.append([("run", GroupClosed(4, "expired", "deadline of 600 s passed", 4))])
    bus.close()
    return folder


def test_what_was_dropped_is_told_from_what_was_released(dropped):
    sql = 'SELECT trajectory, fate FROM fates WHERE "group" > 3 ORDER BY ALL'
    assert rows_of(dropped, sql) == [
        ("4.0", "dropped"), ("4.1", "dropped"), ("5.0", "trained"), ("5.1", "dropped"),
        ("6.0", "trained"), ("6.1", "trained"), ("6.2", "released"), ("7.0", "dropped"),
        ("7.1", "trained"),
    ]  # fmt: skip


def test_an_unfinished_trajectory_has_the_difficulty_of_its_group(dropped):
    sql = "SELECT difficulty, prompt_length, tokens FROM fates WHERE trajectory IN ('4.1', '6.2')"
    assert rows_of(dropped, f"{sql} ORDER BY ALL") == [(0.5, 9.0, None), (1.0, 9.0, None)]


@pytest.mark.parametrize("place", ["dropped", "archive"])
def test_bias_is_the_quantiles_of_the_fates(place, dropped):
    """Recounted by NumPy from the rows of `fates`."""
    folder = dropped if place == "dropped" else EXAMPLES / "archive"
    rows = rows_of(folder, "SELECT fate, finished, tokens, prompt_length, difficulty FROM fates")
    columns = {"length": 2, "prompt_length": 3, "difficulty": 4}
    chosen = {
        "admitted": lambda row: True,
        "finished": lambda row: row[1],
        "trained": lambda row: row[0] == "trained",
        "dropped": lambda row: row[0] == "dropped",
        "filtered": lambda row: row[0] == "filtered",
    }
    found = rows_of(folder, f"SELECT measure, quantile, {', '.join(chosen)} FROM bias")
    assert len(found) == len(columns) * len(QUANTILES)
    for measure, quantile, *shown in found:
        at = columns[measure]
        for name, value in zip(chosen, shown, strict=True):
            some = [row[at] for row in rows if chosen[name](row) and row[at] is not None]
            expected = float(np.quantile(some, quantile)) if some else None
            assert value == pytest.approx(expected), (measure, quantile, name)


def test_fates_are_those_of_the_ledger():
    """The shipped archive, recounted from the records of its topics, without the views' SQL."""
    folder = EXAMPLES / "archive"
    takes = rows_of(folder, "SELECT step, members FROM ledger WHERE schema = 'take/1'")
    step_of = {m["trajectory"]: step for step, members in takes for m in members}
    spans = rows_of(folder, "SELECT trajectory, spans FROM trajectories WHERE NOT void")
    kept = {
        name: sum(
            span["end"] - span["start"] for span in found
            if step_of[name] - 1 - span["version"]["number"] <= 3
        )
        for name, found in spans if name in step_of
    }  # fmt: skip
    shown = dict(rows_of(folder, "SELECT trajectory, tokens_trained FROM fates WHERE step > 0"))
    assert shown == kept
    fates = dict(rows_of(folder, "SELECT trajectory, fate FROM fates"))
    assert {name for name, fate in fates.items() if fate == "trained"} == {
        name for name, tokens in kept.items() if tokens
    }


def enumerated(right: int, count: int, k: int) -> float:
    """pass@k as the share of all choices of k answers with a right one."""
    choices = list(combinations([index < right for index in range(count)], k))
    return sum(map(any, choices)) / len(choices)


def test_pass_at_k_of_training_is_that_of_all_choices():
    folder = EXAMPLES / "archive"
    rows = rows_of(folder, 'SELECT wave, "group", reward FROM fates')
    by_group: dict[tuple[int, int], list[float]] = defaultdict(list)
    for wave, group, reward in rows:
        by_group[wave, group].append(reward)
    found = rows_of(folder, "SELECT step, k, prompts, estimate FROM pass_at_k")
    assert {k for _, k, _, _ in found} == {1, 2, 4, 8}
    for step, k, prompts, estimate in found:
        some = [r for (wave, _), r in by_group.items() if wave + 1 == step]
        each = [enumerated(sum(one >= 1 for one in r), len(r), k) for r in some]
        assert prompts == len(some)
        assert estimate == pytest.approx(sum(each) / len(each))


def test_pass_at_k_of_an_evaluation_is_that_of_all_choices(folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders["live"], folder)
    by_prompt = [[0, 6, 0.0], [1, 6, 1 / 6], [4, 6, 0.7], [6, 6, 1.0]]
    line = EVALUATION | {"step": 7, "prompts": "ab", "by_prompt": by_prompt}
    (folder / "metrics" / "eval.jsonl").write_text(json.dumps(line) + "\n")
    sql = "SELECT k, prompts, estimate, error FROM pass_at_k WHERE source = 'held_out' ORDER BY k"
    found = rows_of(folder, sql)
    assert [row[0] for row in found] == [1, 2, 4]
    for k, prompts, estimate, error in found:
        each = [enumerated(right, count, k) for right, count, _ in by_prompt]
        assert prompts == 4
        assert estimate == pytest.approx(np.mean(each))
        assert error == pytest.approx(np.std(each, ddof=1) / 2)
    assert rows_of(folder, "SELECT prompts FROM evaluations") == [("ab",)]
