"""Recovery is level-triggered: whichever process died, a trajectory that no living rollout
generates is assigned again (invariants 2, 4).
"""

import numpy as np
from msgspec.structs import replace

from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.assignments import (
    assignment_record,
    continuations,
    eligible_rollouts,
    free_room,
    unassigned_trajectories,
)
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.records import Admitted, Partial, Prompt, RolloutStatus
from rollstream.streams.values import Address, Sampling, Span, Version

PACE = AdmissionPace(groups_per_step=4, max_lag=2, ready_groups_max=10, waves_max=100)
V3 = Version(3, 1)


def status(name: str, term: int = 1, version: Version = V3, **changed: object) -> RolloutStatus:
    values: dict[str, object] = {
        "rollout": name, "term": term, "slots": 8, "running": 0, "waiting": 0, "kv_used": 0,
        "kv_capacity": 100, "version": version, "verified": True, "health": "generating",
        "quota_left": 16, "tokens_per_s": 0.0, "tokens_total": 0, "idle_s": 0.0, "time_s": 0.0,
    }  # fmt: skip
    return RolloutStatus(**(values | changed))  # type: ignore[arg-type]


def partial(trajectory: str, attempt: int, tokens: int = 2, last: bool = False) -> Partial:
    spans = (Span(0, tokens, V3),) if tokens else ()
    return Partial(
        trajectory, 0, attempt, "a", 1, None, 2, np.zeros(tokens, np.uint32),
        np.ones(tokens, np.uint8), np.zeros(tokens, np.float32), spans, last=last,
    )  # fmt: skip


def state_with_group(*rollouts: RolloutStatus) -> DispatchState:
    state = DispatchState()
    state.apply_admitted(Admitted(0, 0, ("0.0", "0.1"), 60.0, Address(0, 0)))
    state.groups[0].prompt = Prompt(
        0, "remainder", np.array([1, 2], np.uint32), 2, Sampling(), seed=0
    )
    for rollout in rollouts:
        state.apply_status(rollout, now_s=0.0)
    return state


def order_all(state: DispatchState, rollout: str, keep_version: bool = False) -> None:
    for lost in unassigned_trajectories(state):
        for trajectory, how in continuations(state, lost, keep_version).items():
            state.apply_assignment(
                assignment_record(state, PACE, state.groups[0], trajectory, how, rollout)
            )


def test_admitted_but_never_ordered_is_an_orphan():
    assert unassigned_trajectories(state_with_group(status("a"))) == [["0.0", "0.1"]]


def test_ordered_work_of_a_living_rollout_is_nobodys_orphan():
    state = state_with_group(status("a"))
    order_all(state, "a")
    assert unassigned_trajectories(state) == []


def test_a_silent_rollouts_work_resumes_from_its_partial_under_the_next_attempt():
    state = state_with_group(status("a"))
    order_all(state, "a")
    state.apply_partial(partial("0.0", 1), Address(2, 7))
    assert state.drop_rollouts(silent_before_s=1.0) == ["a"]
    how = continuations(state, unassigned_trajectories(state)[0], keep_version=False)
    assert (how["0.0"].kind, how["0.0"].attempt, how["0.0"].partial) == ("resume", 2, Address(2, 7))
    assert (how["0.1"].kind, how["0.1"].attempt) == ("start", 2)


def test_the_chain_of_an_episode_begins_with_what_its_program_set_before_its_first_turn():
    state = state_with_group(status("a"))
    order_all(state, "a")
    rewarded = replace(partial("0.0", 1, tokens=0), environment='{"reward": 1.0, "scores": {}}')
    state.apply_partial(rewarded, Address(2, 7))
    state.apply_partial(replace(partial("0.0", 1), previous=Address(2, 7)), Address(2, 8))
    state.apply_partial(partial("0.1", 1, tokens=0, last=True), Address(2, 9))
    assert (state.chains["0.0"].first, state.chains["0.0"].at) == (Address(2, 7), Address(2, 8))
    assert "0.1" not in state.chains


def test_a_restarted_rollout_holds_nothing_of_its_earlier_term():
    state = state_with_group(status("a", term=1))
    order_all(state, "a")
    state.apply_status(status("a", term=2), now_s=0.0)
    assert unassigned_trajectories(state) == [["0.0", "0.1"]]


def test_a_zombie_rollouts_status_does_not_bring_it_back():
    state = state_with_group(status("a", term=2))
    state.apply_status(status("a", term=1), now_s=5.0)
    assert state.rollouts["a"].status.term == 2


def test_keep_version_resumes_only_where_the_version_is_held():
    """Invariant 4."""
    state = state_with_group(
        status("a"), status("b", version=V3), status("c", version=Version(4, 1))
    )
    order_all(state, "a", keep_version=True)
    state.apply_partial(partial("0.0", 1), Address(0, 1))
    del state.rollouts["a"]
    how = continuations(state, ["0.0"], keep_version=True)["0.0"]
    assert (how.kind, how.version) == ("resume", V3)
    assert eligible_rollouts(state, how.version) == {"b"}


def test_keep_version_restarts_and_reports_it_when_no_rollout_holds_the_version():
    """Invariant 4: counted, never resumed under another version."""
    state = state_with_group(status("a"), status("c", version=Version(4, 1)))
    order_all(state, "a", keep_version=True)
    state.apply_partial(partial("0.0", 1), Address(0, 1))
    del state.rollouts["a"]
    how = continuations(state, ["0.0"], keep_version=True)["0.0"]
    assert (how.kind, how.partial, how.discards_tokens) == ("start", None, True)


def test_first_completion_ends_a_trajectory_and_the_second_is_late():
    """Invariant 2."""
    state = state_with_group(status("a"))
    order_all(state, "a")
    state.apply_completion(0, "0.0")
    state.apply_completion(0, "0.0")
    assert (state.completed, state.late) == (1, 1)
    assert "0.0" not in state.assignments


def test_a_closed_group_releases_what_still_runs():
    state = state_with_group(status("a"))
    order_all(state, "a")
    state.apply_completion(0, "0.0")
    released = state.apply_closed(0)
    assert [(r.trajectory, r.assignment.rollout) for r in released] == [("0.1", "a")]
    assert unassigned_trajectories(state) == []


def test_a_draining_rollout_takes_resumes_but_nothing_new():
    state = state_with_group(status("a", health="draining"))
    free = free_room(state, queue_per_slot=0.0)
    assert free.resumes == {"a": 8}
    assert free.new == {}


def test_a_rollout_read_back_from_before_dispatch_started_gets_nothing_new():
    state = state_with_group()
    state.apply_status(status("old"), now_s=0.0, fresh=False)
    assert free_room(state, queue_per_slot=0.0).new == {}


def test_work_goes_only_to_rollouts_that_verified_what_they_serve():
    """Neither new trajectories nor resumes, whatever its health; it keeps what it has."""
    state = state_with_group(status("a", verified=False), status("b"))
    free = free_room(state, queue_per_slot=0.25)
    assert set(free.new) == set(free.resumes) == {"b"}
    order_all(state, "a")
    assert unassigned_trajectories(state) == []
    state.apply_status(status("b", verified=False), now_s=1.0)
    assert not free_room(state, queue_per_slot=0.25).new
    state.apply_status(status("a"), now_s=2.0)
    assert set(free_room(state, queue_per_slot=0.25).new) == {"a"}


def test_under_keep_version_an_unverified_holder_is_no_holder():
    """Invariant 4: no rollout counts as holding its version, so the trajectory restarts."""
    state = state_with_group(status("a", verified=False), status("b", version=Version(4, 1)))
    order_all(state, "b", keep_version=True)
    state.apply_partial(partial("0.0", 1), Address(2, 7))
    how = continuations(state, ["0.0"], keep_version=True)["0.0"]
    assert (how.kind, how.discards_tokens) == ("start", True)
