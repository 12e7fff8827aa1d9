"""Dropping by lag is a bias against long answers: the report compares dropped with trained answers,
and warns.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.look.report.history import RunHistory, history_of
from rollstream.look.report.summary import summarise
from rollstream.look.report.untrained import DROPPED_MIN, DropComparison, drop_bias_warnings
from rollstream.streams.records import GroupClosed, Record, StepDone, Take, Trajectory
from rollstream.streams.values import Address, GroupMembers, Member, Span, Version
from tests.index.indexed_records import index_of
from tests.report.report_html import report_html

V0 = Version(0, 1)


def finished(group: int, index: int, tokens: int, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(
        f"{group}.{index}", group, index, 1, "t", "a", 1, np.zeros(tokens, np.uint32),
        np.ones(tokens, np.uint8), np.zeros(tokens, np.float32), (Span(0, tokens, V0),), "stop",
        reward, V0, 0.0, 1.0,
    )  # fmt: skip


def taken(step: int, group: int, names: int, used: int) -> Take:
    members = tuple(Member(f"{group}.{i}", Address(0, i), "h") for i in range(names))
    return Take(step, 0, 0, members[:used], (GroupMembers(group, members),))


def done(step: int, dropped: int) -> StepDone:
    return StepDone(step, Version(step, 1), "h", 1, {}, {"dropped": dropped}, 1.0)


def compared(*records: Record) -> DropComparison:
    with index_of(*records) as index:
        return history_of(index).dropped


def test_left_out_members_and_expired_groups_are_dropped_the_dead_are_not():
    dead = replace(finished(0, 3, 9), finish="dead")
    found = compared(
        taken(1, 0, 4, used=2), done(1, dropped=1),
        GroupClosed(1, "expired", "", 1), GroupClosed(2, "filtered", "", 1),
        finished(0, 0, 10), finished(0, 1, 20, 0.0), finished(0, 2, 80, 0.5), dead,
        finished(1, 0, 90, None), finished(2, 0, 500), finished(0, 0, 10),
    )  # fmt: skip
    assert (found.dropped, found.trained) == (2, 2)
    assert (found.length_dropped, found.length_trained) == (85.0, 15.0)
    assert (found.reward_dropped, found.reward_trained) == (0.5, 0.5)


def test_a_sample_left_out_for_another_reason_or_still_trainable_is_not_dropped():
    open_step = compared(taken(1, 0, 4, used=2), finished(0, 3, 80))
    unscored = compared(taken(1, 0, 4, used=2), done(1, dropped=0), finished(0, 3, 80))
    assert open_step.dropped == unscored.dropped == 0


@pytest.mark.parametrize(
    ("length", "reward", "expected"),
    [
        (111.0, 1.0, ["median length 111 against 100"]),
        (89.0, 1.2, ["median length 89 against 100 and reward 1.2 against 1"]),
        (100.0, 0.0, ["median reward 0 against 1"]),
        (110.0, 1.05, []),
    ],
)
def test_one_sentence_names_the_medians_that_differ_by_more_than_a_tenth(
    length: float, reward: float, expected: list[str]
):
    found = drop_bias_warnings(DropComparison(DROPPED_MIN, 500, length, 100.0, reward, 1.0))
    whole = f"{DROPPED_MIN} answers dropped for age differ from the 500 trained: "
    assert [concern.what for concern in found] == [whole + what for what in expected]


@pytest.mark.parametrize(
    ("dropped", "trained", "warns"),
    [
        (DROPPED_MIN, 500, True),
        (DROPPED_MIN - 1, 500, False),
        (72, 11_520, False),
        (231, 11_520, True),
        (230, 11_520, False),
    ],
)
def test_a_few_dropped_answers_or_a_small_share_warn_of_nothing(
    dropped: int, trained: int, warns: bool
):
    found = DropComparison(dropped, trained, 900.0, 100.0, 0.0, 1.0)
    assert len(list(drop_bias_warnings(found))) == warns


def test_nothing_trained_or_nothing_judged_warns_of_nothing():
    assert list(drop_bias_warnings(DropComparison(100, 0, 90.0, None, None, None))) == []


def test_the_report_and_the_last_output_show_both():
    records = (
        taken(1, 0, 3, used=2), done(1, dropped=1),
        finished(0, 0, 10), finished(0, 1, 12), finished(0, 2, 80, 0.0),
    )  # fmt: skip
    with index_of(*records) as index:
        history = history_of(index)
    summary = summarise(history)
    assert dict(summary.rows())["dropped for age"] == "1 answers, median 80 tokens (trained 11)"
    page = report_html(history, summary)
    assert "Samples dropped for their age" in page
    assert "Samples dropped for their age" not in report_html(RunHistory(), summarise(RunHistory()))
