"""Warnings about flow, log and versions, each from a planted state; and the report with them."""

from dataclasses import replace

import numpy as np
import pytest

from rollstream.look.monitor import warnings_flow, warnings_processes
from rollstream.look.monitor.concerns import CONCERNS, warnings_of
from rollstream.look.monitor.state import ArchiveBacklog, DeadLetters, RunState
from rollstream.look.report.history import RunHistory
from rollstream.look.report.summary import summarise
from rollstream.streams.records import GroupClosed, Opened, Prompt
from rollstream.streams.values import Sampling, Version
from tests.report.report_html import report_html
from tests.support import planted_states as planted
from tests.support.planted_states import (
    GROUPS,
    NOW_S,
    SAMPLES,
    STEP_S,
    STEPS,
    healthy,
    kinds,
    moment,
)

OPEN = STEPS * GROUPS  # the first of the open groups


# ---- flow ----------------------------------------------------------------------------------------


def test_a_run_in_which_nothing_is_written():
    state = healthy()
    assert kinds(state, NOW_S + 60) == ["run_silent"]
    silent = moment(state, NOW_S + 60)
    assert (silent.phase, silent.pace.left_s) == ("silent for 60\N{NO-BREAK SPACE}s", None)


def test_a_run_that_was_started_again_just_now_may_be_silent():
    state = healthy()
    state.apply_event({"time_s": NOW_S + 590, "event": "start", "role": "rollout-0"})
    assert kinds(state, NOW_S + 600) == []
    assert moment(state, NOW_S + 600).phase == "starting"
    assert kinds(state, NOW_S + 900) == ["run_silent"]


def test_no_step_for_long():
    state, later = healthy(), NOW_S + 100
    state.newest_s["status"] = later
    for number in range(2):
        state.apply(planted.status(f"rollout-{number}", later))
    assert kinds(state, later) == ["step_overdue"]
    state.apply(planted.done(STEPS + 1, later - 1))
    assert kinds(state, later) == []


def test_no_first_step_for_long():
    state = planted.plan().state()
    state.began_s = NOW_S - warnings_flow.FIRST_STEP_S - 1
    state.apply(planted.announced(0))
    state.apply(planted.status("rollout-0"))
    state.newest_s["status"] = NOW_S
    assert kinds(state) == ["step_overdue"]


def test_silent_rollouts_are_named():
    state = healthy(6)
    for number in range(1, 6):
        state.apply(planted.status(f"rollout-{number}", NOW_S - 60, term=2))
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "rollouts_silent"
    assert "rollout-1, rollout-2, rollout-3 and 2 more are silent for 60" in concern.what


def test_a_rollout_that_left_is_not_silent():
    state = healthy()
    state.apply(planted.status("rollout-1", NOW_S - 60, term=2, health="leaving"))
    assert kinds(state) == []


def test_starving_rollouts_are_distinguished_by_the_cause():
    state = idle(healthy())
    (concern,) = warnings_of(moment(state))
    assert (concern.kind, "no prompt is waiting" in concern.do) == ("rollouts_starved", True)
    state.apply(prompt(OPEN + GROUPS), NOW_S)
    assert "logs/dispatch.log" in warnings_of(moment(state))[0].do
    for group in range(OPEN + GROUPS, OPEN + 5 * GROUPS):
        state.apply(planted.admitted(group), NOW_S)
    assert "the trainer is the slower side" in warnings_of(moment(state))[0].do


def test_rollouts_and_trainer_that_both_wait_for_a_slow_reward_are_one_concern():
    state = idle(healthy())
    for step in range(STEPS - 9, STEPS + 1):
        state.apply(planted.done(step, wait_s=1.5))
    for group in range(OPEN + GROUPS, OPEN + 5 * GROUPS):
        state.apply(planted.admitted(group), NOW_S)
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "rollouts_starved"
    assert "the trainer waits" in concern.what
    assert "task.reward_processes" in concern.do


def idle(state: RunState) -> RunState:
    for number in range(2):
        status = planted.status(f"rollout-{number}", NOW_S, idle_s=1.19)
        state.apply(status)
    return state


def prompt(group: int) -> Prompt:
    return Prompt(group, "remainder", np.zeros(4, np.uint32), SAMPLES, Sampling(), 0)


def test_a_starving_trainer():
    state = healthy()
    for step in range(STEPS - 9, STEPS + 1):
        state.apply(planted.done(step, wait_s=1.5))
    assert kinds(state) == ["trainer_starved"]


def test_a_full_ready_queue():
    state = healthy()
    for group in range(OPEN, OPEN + 5 * GROUPS):
        state.apply(planted.admitted(group), NOW_S - 1)
        for index in range(SAMPLES):
            state.apply(planted.finished(group, index, index % 2, STEPS), NOW_S)
    assert moment(state).queue.ready_groups == 5 * GROUPS
    assert kinds(state) == ["queue_full"]


def test_lag_near_its_bound_and_what_it_costs():
    state = healthy()
    for step in range(STEPS - 10, STEPS + 1):
        state.apply(planted.done(step, lag_consumed_mean=3.6, counts={"masked_tokens": 60}))
    for group in range(1000, 1003):
        state.apply(GroupClosed(group, "expired", "all above max_lag", STEPS), NOW_S)
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "lag_high"
    assert "mean lag when trained is 3.6 of at most 4" in concern.what
    assert "11% of generated tokens are masked" in concern.what
    assert "3 of 83 groups expired" in concern.what


def test_roles_that_die_again_and_again():
    state = healthy()
    for ago_s in (700, 50, 40, 30):
        event = {"event": "death", "role": "rollout-1", "code": -9}
        state.apply_event({"time_s": NOW_S - ago_s, **event})
    (concern,) = warnings_of(moment(state))
    assert (concern.kind, concern.what[:8]) == ("roles_dying", "3 deaths")


@pytest.mark.parametrize(
    ("ages_s", "last"),
    [
        ((590, 320, 50), True),
        ((205, 200, 195, 190), False),
        ((500, 360, 220), True),
        ((500, 495, 490, 485, 190), False),
    ],
    ids=["slowly", "all at once", "in the middle of a slow series", "one after several at once"],
)
def test_deaths_are_over_after_twice_their_distance(ages_s: tuple[int, ...], last: bool) -> None:
    state = healthy()
    for ago_s in ages_s:
        event = {"event": "death", "role": "rollout-1", "code": -9}
        state.apply_event({"time_s": NOW_S - ago_s, **event})
    assert kinds(state) == ["roles_dying"] * last


def test_roles_that_an_orchestrator_restarts_again_and_again():
    """It records no deaths: their terms tell. One restart of each of several is an upgrade."""
    state = healthy(4)
    for number in range(4):
        state.apply(planted.status(f"rollout-{number}", NOW_S - 0.1, term=2))
    for role in ("trainer", "dispatch"):
        for term in (1, 2, 2):  # `Opened` is in each partition
            state.apply(Opened(role, term), NOW_S - 60)
    assert kinds(state) == []
    state.apply(Opened("trainer", 3), NOW_S - 700)
    state.apply(Opened("trainer", 4), NOW_S - 40)
    assert kinds(state) == []
    state.apply(Opened("trainer", 5), NOW_S - 20)
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "roles_dying"
    assert concern.what.startswith("3 restarts of trainer within")


@pytest.mark.parametrize(
    ("deaths", "lasts"),
    [
        ([("trainer", 40), ("dispatch", 35), ("prompts", 30), ("archive", 20)], False),
        ([("trainer", 300), ("dispatch", 298), ("prompts", 296), ("rollout-1", 10)], False),
        ([("trainer", 400), ("dispatch", 398), ("rollout-1", 200), ("rollout-2", 10)], True),
        (
            [("trainer", 30), ("dispatch", 29), ("trainer", 20), ("dispatch", 19), ("trainer", 9)],
            True,
        ),
    ],
    ids=["an outage", "a death after it", "one after the other", "restarts do not help"],
)
def test_several_roles_that_die_at_once_count_as_one(
    deaths: list[tuple[str, int]], lasts: bool
) -> None:
    state = healthy()
    for role, ago_s in deaths:
        event = {"event": "death", "role": role, "code": 1}
        state.apply_event({"time_s": NOW_S - ago_s, **event})
    assert kinds(state) == ["roles_dying"] * lasts


def test_a_run_that_is_stopped_and_resumed_again_and_again_has_no_deaths():
    state = healthy()
    for term, ago_s in enumerate((120, 80, 40), 2):
        for role in ("trainer", "rollout-0"):
            state.apply_event({"time_s": NOW_S - ago_s - 5, "event": "start", "role": role})
        state.apply(planted.status("rollout-0", NOW_S - ago_s, term=term))
        state.apply(Opened("trainer", term), NOW_S - ago_s)
    state.apply(planted.status("rollout-0", NOW_S - 0.1, term=4))
    assert kinds(state) == []


def test_a_rollout_that_stays_away_is_gone_after_ten_minutes():
    state = healthy(3)
    state.apply(planted.status("rollout-1", NOW_S - warnings_processes.GONE_S + 5, term=2))
    assert kinds(state) == ["rollouts_silent"]
    state.apply(planted.status("rollout-1", NOW_S - warnings_processes.GONE_S - 5, term=3))
    assert kinds(state) == []


def test_a_run_that_cannot_be_read():
    at = replace(moment(healthy()), trouble="no broker\x1b[0m answers")
    (concern,) = warnings_of(at)
    assert concern.kind == "run_unreadable"
    assert concern.what == "no broker?[0m answers"


# ---- log -----------------------------------------------------------------------------------------


def test_dead_letters():
    state = healthy()
    state.dead_letters = {
        "status": DeadLetters(1, "odd"),
        "trajectories": DeadLetters(1200, "starts with b'\\x00'"),
    }
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "dead_letters"
    assert "1\N{NO-BREAK SPACE}200 of trajectories; the newest: starts with" in concern.what
    assert "rollstream tail dead" in concern.do


def test_an_archive_that_is_behind():
    state = healthy()
    state.unarchived = {"ledger": ArchiveBacklog(5, NOW_S - 60)}
    assert kinds(state) == []
    state.unarchived = {"trajectories": ArchiveBacklog(70_000, NOW_S - 7200)}
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "archive_behind"
    assert "2:00:00" in concern.what


def test_weights_that_were_not_verified_or_announced():
    state = healthy(3)
    state.apply(planted.status("rollout-0", NOW_S, verified=False))
    state.apply(planted.applied("rollout-1", "h"))
    state.apply(planted.applied("rollout-2", "another"))
    (concern,) = warnings_of(moment(state))
    assert concern.kind == "unverified_versions"
    assert concern.what.endswith("rollout-0 (v20), rollout-2 (v20)")


# ---- the report ----------------------------------------------------------------------------------


def test_the_report_shows_warnings_and_is_silent_without():
    history = RunHistory()
    assert "Warnings" not in report_html(history, summarise(history))
    history.concerns = warnings_of(moment(healthy(reward=lambda index: 0.0)))
    text = report_html(history, summarise(history))
    assert "Warnings" in text
    assert "groups of task remainder" in text


def test_every_check_stands_an_empty_moment():
    empty = replace(moment(planted.plan().state()), is_over=False, version=1)
    assert [list(concern.check(empty)) for concern in CONCERNS] == [[] for _ in CONCERNS]


def test_a_version_of_another_term_is_not_taken_for_the_announced_one():
    state = healthy(1)
    record = planted.applied("rollout-0", "another")
    state.apply(type(record)("rollout-0", 1, Version(STEPS, 2), "o", "hashes", 1, STEP_S, NOW_S))
    assert kinds(state) == []
