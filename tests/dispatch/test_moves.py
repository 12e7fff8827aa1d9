"""A move is three records, and a process that dies between two of them is recovered like any other
(invariants 2, 4).
"""

from msgspec.structs import replace

from rollstream.consumers.dispatch.layouts import WaveLayouts
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.moves import RepackPlanner
from rollstream.consumers.dispatch.persistence import restore_state, state_to_persist
from rollstream.consumers.dispatch.planner import AssignmentPlanner, Moved, Resumed, Started
from rollstream.consumers.dispatch.policy import MoveSummary
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.records import Admitted, Assignment
from rollstream.streams.values import Address, Version
from tests.dispatch.test_recovery import PACE, V3, partial, state_with_group, status

V4 = Version(4, 1)
TAIL = {"health": "draining", "quota_left": 0, "running": 1, "decode_batch_max": 8}


def ordering() -> AssignmentPlanner:
    started = Started(WaveLayouts(True, PACE.groups_per_step))
    return AssignmentPlanner(PACE, True, 0.25, (Moved(), Resumed(), started))


def repacking() -> RepackPlanner:
    return RepackPlanner(every_s=5.0, max_lag=2, groups_per_wave=PACE.groups_per_step)


def give(state: DispatchState) -> list[Assignment]:
    """Assigns as the service does."""
    records = [o.record for o in ordering().plan(state, LengthHistory(), ())]
    for record in records:
        state.apply_assignment(record)
    return records


def tails() -> DispatchState:
    """Two rollouts under version 3 with one trajectory each; version 4 is announced."""
    state = state_with_group(status("a"), status("b", kv_used=90))
    give(state)
    for trajectory, rollout in (("0.0", "a"), ("0.1", "b")):
        order = replace_order(state, trajectory, rollout)
        state.apply_partial(partial(trajectory, order.attempt), Address(0, 1))
    state.version = V4
    for name, kv in (("a", 90), ("b", 90), ("a", 30), ("b", 40)):
        state.apply_status(status(name, kv_used=kv, **TAIL), now_s=1.0)
    return state


def replace_order(state: DispatchState, trajectory: str, rollout: str) -> Assignment:
    """It was assigned to this rollout."""
    known = state.assignments[trajectory]
    record = Assignment(
        "start", trajectory, 0, int(trajectory[-1]), known.attempt, rollout, 1, known.version,
        "remainder", state.groups[0].prompt.tokens, state.groups[0].prompt.sampling, 0,  # type: ignore[union-attr]
    )  # fmt: skip
    state.apply_assignment(record)
    return record


def asked_back(state: DispatchState) -> Assignment:
    plan = repacking().plan(state, LengthHistory(), now_s=2.0)
    assert plan is not None
    (release,) = plan.releases
    state.apply_assignment(release)
    return release


def test_a_tail_is_released_and_resumes_from_its_last_partial():
    state = tails()
    release = asked_back(state)
    assert (release.kind, release.rollout, release.onward) == ("release", "a", "b")
    assert give(state) == []  # it is the source's until the source gave it up
    state.apply_partial(partial("0.0", 1, tokens=5, last=True), Address(0, 7))
    (order,) = give(state)
    assert (order.kind, order.rollout, order.attempt) == ("resume", "b", 2)
    assert (order.partial, order.version) == (Address(0, 7), V3)


def test_a_plan_names_source_destination_and_size_of_each_move():
    plan = repacking().plan(tails(), LengthHistory(), 10.0)
    assert plan is not None
    assert plan.summaries() == (MoveSummary("a", "b", 1),)


def test_a_completion_that_is_faster_ends_the_move():
    """Invariant 2: one trajectory, whichever rollout was asked for it."""
    state = tails()
    asked_back(state)
    state.apply_completion(0, "0.0")
    state.apply_partial(partial("0.0", 1, last=True), Address(0, 7))
    assert give(state) == []
    assert state.assigned_counts() == {"a": 0, "b": 1}


def test_room_is_kept_at_the_destination_until_the_release():
    state = tails()
    before = state.assigned_counts()
    asked_back(state)
    assert state.assigned_counts() == {"a": before["a"], "b": before["b"] + 1}


def test_a_source_that_dies_before_it_answers_is_recovered_like_any_other():
    state = tails()
    asked_back(state)
    del state.rollouts["a"]
    (order,) = give(state)
    assert (order.kind, order.rollout, order.attempt) == ("resume", "b", 2)


def test_a_destination_that_dies_is_replaced():
    state = tails()
    state.apply_status(status("c", **TAIL), now_s=1.0)
    asked_back(state)
    state.apply_partial(partial("0.0", 1, last=True), Address(0, 7))
    del state.rollouts["b"]
    orders = give(state)
    assert {o.trajectory for o in orders} == {"0.0", "0.1"}
    assert {o.rollout for o in orders} <= {"a", "c"}


def test_a_move_survives_the_death_of_dispatch_at_every_point():
    """Released and given-up trajectories are in the persisted state and in the log."""
    state = tails()
    release = asked_back(state)
    again = restore_state(state_to_persist(state, 1, {}))
    assert again.assignments["0.0"].onward == release.onward
    state.apply_partial(partial("0.0", 1, last=True), Address(0, 7))
    again = restore_state(state_to_persist(state, 1, {}))
    again.groups[0].prompt = state.groups[0].prompt
    for name in ("a", "b"):
        again.apply_status(status(name, **TAIL), now_s=1.0)
    (order,) = give(again)
    assert (order.rollout, order.attempt) == ("b", 2)


def test_a_moved_trajectory_is_not_moved_again_before_its_next_partial():
    state = tails()
    asked_back(state)
    state.apply_partial(partial("0.0", 1, last=True), Address(0, 7))
    give(state)
    plan = repacking().plan(state, LengthHistory(), now_s=9.0)
    assert plan is not None
    assert plan.releases == ()


def test_nothing_moves_while_no_rollout_would_pull():
    state = tails()
    state.version = V3
    plan = repacking().plan(state, LengthHistory(), now_s=2.0)
    assert plan is not None
    assert plan.releases == ()


def test_a_rollout_that_runs_what_no_partial_has_shown_is_left_alone():
    """Its request cannot be released, so the rollout would not become empty."""
    state = tails()
    del state.chains["0.0"]
    plan = repacking().plan(state, LengthHistory(), now_s=2.0)
    assert plan is not None
    assert plan.releases == ()


def test_orders_that_only_wait_for_newer_weights_stay_where_they_are():
    state = tails()
    state.apply_admitted(Admitted(1, 0, ("1.0",), 60.0, Address(0, 1)))
    state.groups[1].prompt = replace(state.groups[0].prompt, group=1)  # pyright: ignore[reportArgumentType]
    state.apply_assignment(replace(replace_order(state, "0.0", "a"), trajectory="1.0", group=1))
    state.apply_status(status("a", kv_used=30, **(TAIL | {"waiting": 1, "queued": 1})), now_s=1.0)  # pyright: ignore[reportArgumentType]
    assert asked_back(state).trajectory == "0.0"


def test_it_is_time_every_few_seconds_and_when_a_version_is_out():
    state, when = tails(), repacking()
    assert when.plan(state, LengthHistory(), now_s=2.0) is not None
    assert when.plan(state, LengthHistory(), now_s=3.0) is None
    state.version = Version(5, 1)
    assert when.plan(state, LengthHistory(), now_s=3.1) is not None
    assert when.plan(state, LengthHistory(), now_s=9.0) is not None


def test_a_rollout_that_leaves_is_dropped_only_after_its_last_records_were_read():
    state = tails()
    left = state.departed()
    state.apply_status(status("a", health="leaving"), now_s=3.0)
    assert state.drop_rollouts(0.0, left) == []
    assert "a" in state.rollouts, "it was read in this round, what it published before perhaps not"
    left = state.departed()
    state.apply_status(status("b", health="leaving"), now_s=3.1)
    state.apply_status(status("b", term=2), now_s=3.2)
    assert state.drop_rollouts(0.0, [*left, "b"]) == []
    assert "a" not in state.rollouts
    assert "b" in state.rollouts, "it came back"


def test_a_trajectory_put_off_restarts_on_the_newest_version():
    state = tails()
    state.apply_status(status("c", version=V4), now_s=1.0)
    (order,) = ordering().restart_on_newest(state, ["0.0"], LengthHistory())
    assert order.discards_tokens
    record = order.record
    assert (record.kind, record.rollout, record.version, record.attempt) == ("start", "c", V4, 2)
