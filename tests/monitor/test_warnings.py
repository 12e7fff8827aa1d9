"""Warnings: each from a planted state, none from a healthy run."""

import numpy as np
import pytest

from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.state import DeadLetters, RunState
from rollstream.streams.records import Annotation, GroupClosed
from tests.support import planted_states as planted
from tests.support.planted_states import GROUPS, NOW_S, SAMPLES, STEPS, healthy, kinds, moment

OPEN = STEPS * GROUPS  # the first of the open groups


@pytest.mark.parametrize("rollouts", [1, 4, 40])
def test_a_healthy_run_has_no_warning(rollouts):
    assert kinds(healthy(rollouts)) == []


def test_a_run_that_has_not_begun_has_no_warning():
    assert kinds(planted.plan().state()) == []


def test_a_finished_run_does_not_warn_of_its_silence():
    state = healthy()
    state.apply_event({"time_s": NOW_S, "event": "complete"})
    assert kinds(state, NOW_S + 86_400) == []


def test_every_warning_states_the_problem_and_what_to_do():
    state = sick()
    found = warnings_of(moment(state))
    assert len(found) >= 6
    for concern in found:
        assert concern.what
        assert concern.do
        assert "\n" not in concern.what + concern.do
    assert len({concern.kind for concern in found}) == len(found)


def sick() -> RunState:
    """Many faults at once."""
    state = healthy(reward=lambda index: 0.0)
    for step in range(1, STEPS + 1):
        state.apply(planted.done(step, reward_mean=0.0, wait_s=1.9))
    state.apply(planted.status("rollout-1", NOW_S - 60, term=2))
    state.apply(planted.status("rollout-0", verified=False, term=2))
    state.dead_letters = {"trajectories": DeadLetters(3, "starts with b'\\x00'")}
    return state


# ---- learning ------------------------------------------------------------------------------------


def test_a_task_whose_rewards_are_all_equal_is_reported_with_its_name():
    state = healthy(reward=lambda index: 1.0)
    assert kinds(state) == ["equal_rewards/remainder"]
    what = warnings_of(moment(state))[0].what
    assert f"all of the last {STEPS * GROUPS} groups of task remainder (mean 1)" in what


def test_only_the_task_without_differences_is_named():
    state = healthy()
    for group in range(200, 220):
        state.apply(planted.admitted(group), NOW_S)
        for index in range(SAMPLES):
            state.apply(planted.finished(group, index, 0.0, task="chain_sum"), NOW_S)
        state.apply(planted.take(STEPS, [group]), NOW_S)
    assert kinds(state) == ["equal_rewards/chain_sum"]


def test_a_few_equal_groups_are_no_matter():
    state = planted.plan().state()
    for step in range(1, 4):
        planted.apply_step(state, step, lambda index: 1.0)
    assert "equal_rewards/remainder" not in kinds(state)


@pytest.mark.parametrize(("reward", "advice"), [(0.0, "compare some answers"), (1.0, "solved")])
def test_a_reward_that_stands_still(reward, advice):
    state = healthy()
    for step in range(5, STEPS + 1):
        state.apply(planted.done(step, reward_mean=reward))
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "constant_reward"
    assert f"exactly {reward:g} for 16 steps" in concern.what
    assert advice in concern.do


def test_many_filtered_groups():
    state = healthy()
    for group in range(1000, 1000 + STEPS * GROUPS + 8):
        state.apply(GroupClosed(group, "filtered", "all rewards are 1", STEPS), NOW_S)
    assert kinds(state) == ["filtered_groups"]


def test_many_cut_answers():
    state = healthy()
    for group in range(28):
        for index in range(SAMPLES):
            again = planted.finished(1000 + group, index, 0.5, finish="length")
            state.apply(again, NOW_S)
    assert "cut_trajectories" in kinds(state)
    assert "44% of trajectories are cut at 420 tokens" in warnings_of(moment(state))[-1].what


def test_dead_trajectories_with_their_commonest_reason():
    state = healthy()
    for index, reason in enumerate(["odd", *["KeyError:\n'answer' \x1b[2J"] * 4]):
        state.apply(planted.finished(1000 + index, 0, None, finish="dead", reason=reason), NOW_S)
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "dead_trajectories"
    assert concern.what.startswith("5 of the last 256 trajectories died")
    assert concern.what.endswith("4 times: KeyError: 'answer' ?[2J")


def test_dead_trajectories_are_forgotten_after_ten_steps():
    state = healthy()
    for index in range(40):
        state.apply(planted.finished(1000 + index, 0, None, finish="dead", reason="odd"), NOW_S)
    assert kinds(state) == ["dead_trajectories"]
    judged = moment(state).plan.judged_trajectories()
    for index in range(judged - 2):
        state.apply(planted.finished(2000 + index, 0, 0.5), NOW_S)
    assert kinds(state) == []


def test_a_single_dead_trajectory_is_no_matter():
    state = healthy()
    state.apply(planted.finished(1000, 0, None, finish="dead", reason="odd"), NOW_S)
    assert kinds(state) == []


def test_a_complete_group_that_waits_for_its_reward():
    state = healthy()
    for index in range(SAMPLES):
        state.apply(planted.finished(OPEN, index, None), NOW_S - 400)
    assert moment(state).queue.ready_groups == 0
    assert kinds(state) == ["unscored_groups"]
    for index in range(SAMPLES):
        state.apply(note(OPEN, index), NOW_S)
    assert moment(state).queue.ready_groups == 1
    assert kinds(state) == []


def note(group: int, index: int) -> Annotation:
    values = np.array([1.0], np.float32)
    return Annotation(f"{group}.{index}", group, "reward", values, "scorer-0")


def test_annotations_that_come_too_late():
    state = healthy()
    for index in range(SAMPLES):
        state.apply(note(0, index), NOW_S)
    assert kinds(state) == ["late_annotations"]


def test_a_step_that_skipped_one_of_its_updates_is_reported():
    state = healthy()
    state.apply(planted.done(STEPS, updates_skipped=1.0))
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "skipped_updates"
    assert concern.what.startswith("1 of the last steps skipped an update")


def test_refused_records_of_other_topics_are_counted_by_topic():
    state = healthy()
    state.apply(planted.done(19, counts={"refused_annotations": 2, "trained": 8}))
    state.apply(planted.done(20, counts={"refused_annotations": 1, "trained": 8}))
    for counts in ({"status": 3}, {"status": 1, "partials": 5, "rubbish": 1}, {"applied": "x"}):
        state.apply_move({"time_s": 1.0, "foreign": counts})
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "foreign_records"
    assert concern.what.endswith("3 in annotations, 5 in partials, 4 in status")


def test_trajectories_that_cannot_be_trained_are_reported_by_kind():
    state = healthy()
    for step, counts in ((19, {"refused_logprobs": 2}), (20, {"refused_logprobs": 1})):
        state.apply(planted.done(step, counts={**counts, "refused_spans": 1, "trained": 8}))
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "refused_trajectories"
    assert concern.what.endswith("cannot be trained: 3 for logprobs, 2 for spans")
