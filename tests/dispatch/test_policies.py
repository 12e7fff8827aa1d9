"""What every `AssignmentPolicy` does, whatever it prefers: those that `dispatch.placement` names,
and one of a few lines that a newcomer could write.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.dispatch import policy as policies
from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.assignments import (
    admission_record,
    assignment_record,
    eligible_rollouts,
    free_room,
    slot_room,
    unassigned_trajectories,
)
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.policy import (
    ASSIGNMENT_POLICIES,
    AssignmentPolicy,
    MovePlan,
    PlannedAssignment,
    PolicyScope,
    open_policy,
)
from rollstream.consumers.dispatch.service import Dispatch
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.unassigned import UnassignedSamples, find_unassigned
from rollstream.consumers.settings import DispatchSettings
from rollstream.streams.records import Admitted, Assignment, Partial, Prompt
from rollstream.streams.values import Address, Sampling, Span, Version
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import status

PACE = AdmissionPace(groups_per_step=4, max_lag=None, ready_groups_max=40, waves_max=100)
SAMPLES = 2
QUEUE = 0.25


class FirstFit:
    """The smallest policy: the first rollout, by name, that has room."""

    def __init__(self, scope: PolicyScope) -> None:
        self._scope = scope

    def plan(
        self, state: DispatchState, lengths: LengthHistory, ahead: Sequence[Prompt], now_s: float
    ) -> list[PlannedAssignment]:
        free, scope = free_room(state, QUEUE), self._scope
        planned: list[PlannedAssignment] = []
        for samples in find_unassigned(state, lengths, scope.keep_version):
            room = free.new if samples.kind == "start" else free.resumes
            able = set(room)
            if samples.kind == "resume":
                able &= eligible_rollouts(state, samples.version)
            for trajectory in samples.trajectories:
                rollout = next((name for name in sorted(able) if room[name] > 0), None)
                if rollout is not None:
                    free.take(rollout)
                    planned.append(self._assigned(state, samples, trajectory, rollout))
        return planned

    def _assigned(
        self, state: DispatchState, samples: UnassignedSamples, trajectory: str, rollout: str
    ) -> PlannedAssignment:
        how = samples.how[trajectory]
        record = assignment_record(state, self._scope.pace, samples.group, trajectory, how, rollout)
        return PlannedAssignment(record, how.discards_tokens)

    def room(self, state: DispatchState) -> int:
        waiting = sum(map(len, unassigned_trajectories(state)))
        return sum(free_room(state, QUEUE).new.values()) - waiting

    def move(self, state: DispatchState, lengths: LengthHistory, now_s: float) -> MovePlan | None:
        return None


def opened(name: str, keep_version: bool = False, has_adapters: bool = False) -> AssignmentPolicy:
    settings = DispatchSettings(placement="room" if name == "first" else name)  # type: ignore[arg-type]
    scope = PolicyScope(settings, PACE, keep_version, has_adapters, lambda version: 1000)
    return FirstFit(scope) if name == "first" else open_policy(scope)


NAMES = (*ASSIGNMENT_POLICIES, "first")
UPDATES = ((False, False), (True, False), (True, True))
Event = tuple[str, int, int]

events = st.lists(
    st.tuples(
        st.sampled_from(["come", "die", "admit", "admit", "grow", "give up", "version", "plan"]),
        st.integers(0, 2),
        st.integers(0, 7),
    ),
    max_size=30,
)


class World:
    """Dispatch's state under events, as the inbox would apply them."""

    def __init__(self, policy: AssignmentPolicy, keep_version: bool, adapters: bool) -> None:
        self.policy, self.keep_version, self.adapters = policy, keep_version, adapters
        self.state, self.lengths = DispatchState(version=Version(0, 1)), LengthHistory()
        self.now_s, self.term, self.at = 0.0, Counter[str](), 0

    def apply(self, event: Event) -> None:
        what, who, which = event
        self.now_s += 1.0
        name = "abc"[who]
        open_ = sorted(self.state.assignments)
        if what == "come":
            self.term[name] += 1
            self._report(name)
        elif what == "die":
            self.state.rollouts.pop(name, None)
        elif what == "admit":
            self._admit()
        elif what == "version":
            self.state.version = Version(self.state.version.number + 1, 1)
            if which % 2:
                for other in list(self.state.rollouts):
                    self._report(other)
        elif what in ("grow", "give up") and open_:
            self._partial(open_[which % len(open_)], last=what == "give up")
        elif what == "plan":
            self.plan()

    def _report(self, name: str) -> None:
        term, version = self.term[name], self.state.version
        self.state.apply_status(status(name, term, version, slots=2), self.now_s)

    def _admit(self) -> None:
        group, tokens = self.state.admitted, np.array([1, self.state.admitted], np.uint32)
        prompt = Prompt(group, "t", tokens, SAMPLES, Sampling(tokens_max=64), seed=0)
        record = admission_record(self.state, PACE, prompt, Address(0, group), 60.0)
        self.state.apply_admitted(record)
        self.state.groups[group].prompt = prompt

    def _partial(self, trajectory: str, last: bool) -> None:
        known = self.state.assignments[trajectory]
        rollout = self.state.rollouts.get(known.rollout)
        if rollout is None:
            return
        self.at += 1
        spans = (Span(0, 2, rollout.status.version),)
        group = int(trajectory.split(".")[0])
        record = Partial(
            trajectory, group, known.attempt, known.rollout, known.rollout_term, None, 2,
            np.zeros(2, np.uint32), np.ones(2, np.uint8), np.zeros(2, np.float32), spans, last=last,
        )  # fmt: skip
        self.state.apply_partial(record, Address(0, self.at))

    def plan(self) -> list[Assignment]:
        """Plans as the service does; every plan keeps what a policy promises."""
        before = copy.deepcopy(self.state)
        unassigned = {t for part in unassigned_trajectories(self.state) for t in part}
        planned = self.policy.plan(self.state, self.lengths, (), self.now_s)
        assert unassigned == {t for part in unassigned_trajectories(self.state) for t in part}
        assert before.assignments == self.state.assignments, "planning changes nothing"
        records = [one.record for one in planned]
        names = [record.trajectory for record in records]
        assert len(set(names)) == len(names), "one assignment each"
        assert set(names) <= unassigned
        given = before.assigned_counts()
        for record in records:
            rollout = self.state.rollouts[record.rollout].status
            assert record.rollout_term == rollout.term
            given[record.rollout] += 1
            if record.kind == "resume":
                chain = self.state.chains[record.trajectory]
                assert record.partial == chain.at, "from its newest partial"
                if self.keep_version:
                    assert record.version == chain.version, "invariant 4"
                    loads = record.from_history or self.adapters
                    assert loads or record.version in rollout.held
        for name in {record.rollout for record in records}:
            slots = self.state.rollouts[name].status.slots
            assert given[name] <= slot_room(slots, QUEUE, parked=0), "within its room"
        for number, record in enumerate(records):
            self.state.apply_assignment(record, Address(1, 1000 * int(self.now_s) + number))
        return records


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("keep_version", "adapters"), UPDATES)
@given(events=events)
def test_every_plan_keeps_the_promises(
    name: str, keep_version: bool, adapters: bool, events: list[Event]
) -> None:
    world = World(opened(name, keep_version, adapters), keep_version, adapters)
    for event in events:
        world.apply(event)
    world.plan()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("keep_version", "adapters"), UPDATES)
def test_with_room_everything_is_assigned_also_by_a_policy_that_begins_anew(
    name: str, keep_version: bool, adapters: bool
) -> None:
    """Recovery is level-triggered: what a dead holder's policy knew is not needed."""
    world = World(opened(name, keep_version, adapters), keep_version, adapters)
    for event in [("come", 0, 0), ("come", 1, 0), ("admit", 0, 0), ("admit", 0, 0)]:
        world.apply(event)
    assert len(world.plan()) == 2 * SAMPLES
    for which in range(4):
        world.apply(("grow", 0, which))
    world.apply(("die", 0, 0))
    world.policy = opened(name, keep_version, adapters)  # another holder
    world.apply(("come", 2, 0))
    world.plan()
    assert unassigned_trajectories(world.state) == []


@pytest.mark.parametrize("name", NAMES)
def test_room_counts_what_can_still_be_admitted(name: str) -> None:
    world = World(opened(name), keep_version=False, adapters=False)
    assert world.policy.room(world.state) <= 0, "no rollout"
    world.apply(("come", 0, 0))
    most = world.policy.room(world.state)
    assert most >= 2
    world.apply(("admit", 0, 0))
    assert world.policy.room(world.state) == most - SAMPLES
    world.plan()
    assert world.policy.room(world.state) == most - SAMPLES


def test_dispatch_placement_names_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy is a line in the registry; dispatch's code does not name it."""
    named = dict(ASSIGNMENT_POLICIES) | {"room": f"{__name__}:FirstFit"}
    monkeypatch.setattr(policies, "ASSIGNMENT_POLICIES", named)
    scope = PolicyScope(DispatchSettings(placement="room"), PACE, False, False, lambda _: None)
    assert isinstance(open_policy(scope), FirstFit)


# ---- what `dispatch.placement` decides: where new samples run, and when ----

V3 = Version(3, 1)
WAVE_LENGTHS = (10, 500, 40, 200)
WAVE = AdmissionPace(len(WAVE_LENGTHS), 2, 10, 100)


def planned(
    placement: Literal["ranks", "lengths", "room"], rollouts_per_rank: int = 2
) -> list[Assignment]:
    """The assignments of a wave of four prompts of known lengths to four rollouts."""
    settings = DispatchSettings(placement=placement, rollouts_per_rank=rollouts_per_rank)
    planner = Dispatch(MemoryBus(), MemoryStore(), settings, WAVE, True, 1).policy
    state, lengths = DispatchState(version=V3), LengthHistory()
    for number, length in enumerate(WAVE_LENGTHS):
        state.apply_admitted(Admitted(number, 0, (f"{number}.0",), 60.0, Address(0, number)))
        tokens = np.array([number], np.uint32)
        prompt = Prompt(number, "automaton", tokens, 1, Sampling(), seed=0)
        state.groups[number].prompt = prompt
        lengths.note(prompt, length)
    for name in "abcd":
        state.apply_status(status(name, slots=8), now_s=0.0)
    return [one.record for one in planner.plan(state, lengths, (), 0.0)]


def test_by_room_alone_samples_keep_the_order_of_their_prompts_and_no_length_is_predicted() -> None:
    found = planned("room")
    assert [one.group for one in found] == [0, 1, 2, 3]
    assert {one.predicted for one in found} == {0}


@pytest.mark.parametrize("placement", ["lengths", "ranks"])
def test_by_length_the_longest_come_first(placement: Literal["lengths", "ranks"]) -> None:
    found = planned(placement)
    assert [one.predicted for one in found] == sorted(WAVE_LENGTHS, reverse=True)


def test_only_ranks_keep_long_and_short_answers_on_rollouts_of_their_own() -> None:
    where = {one.predicted: one.rollout for one in planned("ranks")}
    assert {where[10], where[40]}.isdisjoint({where[200], where[500]})
    ascending = {where[10], where[40]} < set("ab")
    assert ascending == (max(where[10], where[40]) < min(where[200], where[500]))
    shared = [one.rollout for one in planned("lengths")]
    assert len(set(shared)) == len(WAVE_LENGTHS)  # the emptiest of all, whatever the length


def test_with_one_rollout_per_rank_the_rollouts_are_ordered_by_length() -> None:
    where = {one.predicted: one.rollout for one in planned("ranks", rollouts_per_rank=1)}
    ordered = [where[length] for length in sorted(WAVE_LENGTHS)]
    assert ordered in (sorted("abcd"), sorted("abcd", reverse=True))
