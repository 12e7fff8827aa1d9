"""`dispatch.placement`: whether expected lengths decide where new samples run, and when."""

from typing import Literal

import numpy as np
import pytest

from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.service import Dispatch
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.settings import DispatchSettings
from rollstream.streams.records import Admitted, Assignment, Prompt
from rollstream.streams.values import Address, Sampling, Version
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import status

V3 = Version(3, 1)
LENGTHS = (10, 500, 40, 200)
PACE = AdmissionPace(len(LENGTHS), 2, 10, 100)


def planned(
    placement: Literal["ranks", "lengths", "room"], rollouts_per_rank: int = 2
) -> list[Assignment]:
    """The assignments of a wave of four prompts of known lengths to four rollouts."""
    settings = DispatchSettings(placement=placement, rollouts_per_rank=rollouts_per_rank)
    planner = Dispatch(MemoryBus(), MemoryStore(), settings, PACE, True, 1).policy
    state, lengths = DispatchState(version=V3), LengthHistory()
    for number, length in enumerate(LENGTHS):
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
    assert [one.predicted for one in found] == sorted(LENGTHS, reverse=True)


def test_only_ranks_keep_long_and_short_answers_on_rollouts_of_their_own() -> None:
    where = {one.predicted: one.rollout for one in planned("ranks")}
    assert {where[10], where[40]}.isdisjoint({where[200], where[500]})
    ascending = {where[10], where[40]} < set("ab")
    assert ascending == (max(where[10], where[40]) < min(where[200], where[500]))
    shared = [one.rollout for one in planned("lengths")]
    assert len(set(shared)) == len(LENGTHS)  # the emptiest of all, whatever the length


def test_with_one_rollout_per_rank_the_rollouts_are_ordered_by_length() -> None:
    where = {one.predicted: one.rollout for one in planned("ranks", rollouts_per_rank=1)}
    ordered = [where[length] for length in sorted(LENGTHS)]
    assert ordered in (sorted("abcd"), sorted("abcd", reverse=True))
