"""Engine against trainer in `top`, in the report and among the warnings."""

import re

import pytest

from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.state import RunState
from rollstream.look.report.history import RunHistory
from rollstream.look.report.summary import summarise
from tests.report.report_html import report_html
from tests.support import planted_states as planted
from tests.support.planted_states import STEPS, drawn, healthy, kinds, moment


def mismatched(mean: float, tokens: float = 100.0, task: str = "remainder") -> RunState:
    """Every step compared so many tokens of one task."""
    state = healthy()
    for step in range(1, STEPS + 1):
        state.apply(planted.done(step, counts=None, **figures(mean, tokens, task)))
    return state


def figures(mean: float, tokens: float, task: str) -> dict[str, float]:
    reward = {f"reward_mean/{task}": 0.5}
    if not tokens:
        near = {f"mismatch_near_lag/{task}": 2.0, f"mismatch_near_mean/{task}": mean}
        return {**reward, f"mismatch_tokens/{task}": 0.0, **near}
    values = {"tokens": tokens, "mean": mean, "max": 3 * mean, "kl": mean**2, "above": 0.0}
    return reward | {f"mismatch_{name}/{task}": value for name, value in values.items()}


def test_a_run_that_agrees_shows_it_and_warns_of_nothing():
    state = mismatched(2e-7)
    assert kinds(state) == []
    shown = drawn(moment(state), 160)
    assert "remainder 2.0e-07 nats (max 6.0e-07)" in shown
    assert "1.0k tokens to step 20" in shown


def test_a_run_without_such_tokens_is_marked():
    state = mismatched(0.02, tokens=0)
    assert kinds(state) == []
    for columns in (80, 160):
        assert "no token of lag 0 · 2.0e-02 at lag 2" in drawn(moment(state), columns)


@pytest.mark.parametrize(
    ("mean", "tokens", "warned"), [(0.2, 100, 1), (0.2, 10, 0), (1.2, 0, 1), (0.9, 0, 0)]
)
def test_what_rounding_cannot_explain_is_a_warning_that_names_the_task(mean, tokens, warned):
    """Too few tokens are not compared: 10 steps of 10 are less than 256."""
    found = warnings_of(moment(mismatched(mean, tokens, "sums")))
    assert [one.kind for one in found] == ["mismatch/sums"] * warned
    for concern in found:
        assert "task sums" in concern.what
        assert "rollouts.vllm.head_float32" in concern.do


def test_what_was_compared_long_ago_is_still_known():
    """Only the first step of a run is sure to compare any tokens."""
    state = healthy()
    for step in range(1, 100):
        state.apply(
            planted.done(step, counts=None, **figures(0.2, 900.0 if step == 1 else 0.0, "sums"))
        )
    assert moment(state).mismatch["sums"].step == 1
    assert "mismatch/sums" in kinds(state)


def test_16_bits_have_a_wider_bound():
    """The planted plan publishes bfloat16, which is the default."""
    assert kinds(mismatched(0.02)) == []


def test_the_report_draws_it_by_task():
    history = RunHistory()
    for step in range(1, STEPS + 1):
        both = {**figures(1e-6, 50.0, "sums"), **figures(1e-6, 50.0, "words")}
        history.steps[step] = planted.done(step, counts=None, **both)
    page = report_html(history, summarise(history))
    assert "Mismatch of engine and trainer" in page
    assert re.search(r'data-name="words" data-x="[^"]* 20" data-y="[^"]*1e-06"', page)


def test_the_report_draws_rewards_by_task_where_there_are_several():
    """With one task, the report has its curve already."""

    def page_of(*tasks: str) -> str:
        rewards = {f"reward_mean/{task}": 0.5 for task in tasks}
        history = RunHistory(steps={1: planted.done(1, counts=None, **rewards)})
        return report_html(history, summarise(history))

    assert "Reward by task" not in page_of("sums")
    assert "Reward by task" in page_of("sums", "words")
