"""A trajectory that is too old to be trained restarts on the newest version only where it would be
in time there: measured, not estimated (invariant 5).
"""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.lengths import ExpectedLength, LengthHistory
from rollstream.consumers.dispatch.moves import RepackPlanner
from rollstream.consumers.dispatch.repack import (
    LagBudget,
    RolloutLoad,
    RunningRequest,
    StepDuration,
    is_outlier,
    lag_budget,
    plan_outliers,
)
from rollstream.streams.values import Address, Version
from tests.dispatch.test_recovery import V3, order_all, partial, state_with_group, status

ROOMY = RolloutLoad("a", V3, 4, 0, 500, 501, 100_000, 64)
OLD = RunningRequest(
    "0.0", "a", V3, 300, 310, ExpectedLength(100, 10, 8), 0.05, lag_left=-1, longest=16_000
)
FAST = LagBudget(max_lag=4, step_s=10.0, token_s=0.05)
"""30 s until it is too late: 600 tokens, which is twice the length of `OLD`."""


def restarts(*running: RunningRequest, budget: LagBudget | None = FAST) -> tuple[str, ...]:
    return plan_outliers(running, [ROOMY], budget)[1]


def test_what_would_be_in_time_on_the_newest_version_starts_again_there():
    assert restarts(OLD) == ("0.0",)


@pytest.mark.parametrize(
    "changed",
    [
        {"generated": 301},
        {"lag_left": 0},
        {"lag_left": None},
        {"expected": None},
        {"expected": ExpectedLength(1.0, 300.0, 8)},
        {"unfinished": 0.5},
        {"all_members_open": False},
    ],
)
def test_what_would_be_late_again_is_not_yet_or_holds_up_its_group_is_left_alone(
    changed: dict[str, object],
):
    assert restarts(replace(OLD, **changed)) == ()  # type: ignore[arg-type]


def test_nothing_starts_again_before_steps_and_speeds_were_measured():
    assert restarts(OLD, budget=None) == ()
    assert lag_budget(4, None, [20.0]) is None
    assert lag_budget(4, 10.0, [0.0]) is None
    assert lag_budget(None, 10.0, [20.0]) is None
    assert lag_budget(4, 10.0, [20.0, 0.0, 10.0, 40.0]) == FAST


def test_the_limit_of_an_answer_bounds_what_it_is_taken_to_be():
    assert restarts(replace(OLD, generated=590, longest=600)) == ("0.0",)
    assert restarts(replace(OLD, generated=590, longest=601)) == ()


runs = st.builds(
    RunningRequest,
    trajectory=st.integers(0, 999).map(lambda n: f"{n}.0"),
    rollout=st.just("a"),
    version=st.just(V3),
    generated=st.integers(1, 5_000),
    kv=st.integers(1, 5_000),
    expected=st.none()
    | st.builds(ExpectedLength, st.floats(1, 500), st.floats(0, 200), st.just(8)),
    unfinished=st.floats(0, 0.2),
    lag_left=st.none() | st.integers(-3, 3),
    longest=st.none() | st.integers(5_000, 9_000),
    all_members_open=st.booleans(),
)
budgets = st.builds(LagBudget, st.integers(0, 8), st.floats(0.1, 1e3), st.floats(1e-4, 1.0))


@given(running=st.lists(runs, max_size=12, unique_by=lambda r: r.trajectory), budget=budgets)
def test_only_hopeless_outliers_start_again_and_twice_their_length_is_in_time(
    running: list[RunningRequest], budget: LagBudget
):
    moves, restarts = plan_outliers(running, [ROOMY], budget)
    known = {one.trajectory: one for one in running}
    assert not {*restarts} & {*moves}
    for one in (known[name] for name in restarts):
        assert is_outlier(one)
        assert one.all_members_open
        assert one.lag_left is not None
        assert one.lag_left < 0
        tokens = min(2 * one.generated, one.longest or 2 * one.generated)
        assert tokens * budget.token_s <= (budget.max_lag - 1) * budget.step_s


@given(running=st.lists(runs, max_size=12, unique_by=lambda r: r.trajectory), budget=budgets)
def test_slower_rollouts_and_faster_steps_never_put_off_more(
    running: list[RunningRequest], budget: LagBudget
):
    tighter = LagBudget(budget.max_lag, budget.step_s / 2, budget.token_s * 2)
    assert {*restarts(*running, budget=tighter)} <= {*restarts(*running, budget=budget)}


@given(
    lasts=st.lists(st.floats(0.1, 1e3), min_size=1, max_size=20),
    looks=st.integers(1, 5),
    first=st.integers(0, 50),
)
def test_the_time_of_a_step_is_within_what_was_seen_however_often_one_looks(
    lasts: list[float], looks: int, first: int
):
    steps, now_s = StepDuration(), 7.0
    steps.observe(first, now_s)
    for number, lasted_s in enumerate(
        [1e9, *lasts], first + 1
    ):  # the time at which `first` was announced
        now_s += lasted_s
        for _ in range(looks):
            steps.observe(number, now_s)
    assert steps.lasts_s is not None
    assert min(lasts) * 0.99 <= steps.lasts_s <= max(lasts) * 1.01


def test_versions_that_come_at_once_count_as_so_many_steps():
    steps = StepDuration()
    for number, now_s in ((3, 0.0), (4, 1.0), (7, 31.0)):
        steps.observe(number, now_s)
    assert steps.lasts_s == 10.0


@pytest.mark.parametrize(("tokens_per_s", "again"), [(100.0, ("0.0", "0.1")), (1.0, ())])
def test_the_service_measures_steps_and_requests(tokens_per_s: float, again: tuple[str, ...]):
    """300 tokens are too old by one version; steps of 100 s leave as many for 600 of them."""
    state, lengths = state_with_group(status("a", kv_capacity=1000)), LengthHistory()
    prompt = state.groups[0].prompt
    assert prompt is not None
    lengths.note(prompt, 10)
    order_all(state, "a")
    state.admitted = 10  # the wave is complete, and all else of it has ended
    for name in ("0.0", "0.1"):
        state.apply_partial(partial(name, 1, tokens=300), Address(0, 1))
    repacking, plan = RepackPlanner(every_s=5.0, max_lag=2, groups_per_wave=10), None
    state.apply_status(status("a", running=2, kv_used=604, kv_capacity=1000), now_s=0.0)
    for number in (3, 4, 5, 6):
        state.version = Version(number, 1)
        newest = status("b", version=state.version, running=1, tokens_per_s=tokens_per_s)
        state.apply_status(newest, now_s=0.0)
        plan = repacking.plan(state, lengths, now_s=100.0 * number)
    assert plan is not None
    assert plan.restarts == again
