"""Short samples are assigned beside the last long answers of a draining rollout, if they end before
these (docs/explanation/scheduling.md, Filling tails).
"""

import numpy as np
import pytest

from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.service import Dispatch
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.settings import DispatchSettings
from rollstream.streams.records import Admitted, Assignment, Prompt
from rollstream.streams.tails import fits_tail, tokens_left
from rollstream.streams.values import Address, Sampling, Version
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import partial, status

V3, V4 = Version(3, 1), Version(4, 1)
LENGTHS = (900, 50, 800)
PACE = AdmissionPace(len(LENGTHS), None, 10, 100)


def planned(predicted: int, **settings: object) -> list[str]:
    """What starts at a rollout that drains with one answer of group 0 left, predicted to be so
    long; groups 1 and 2 wait.
    """
    settings = {"fill_tails": True, "max_lag": None} | settings
    chosen = DispatchSettings(**settings)  # type: ignore[arg-type]
    planner = Dispatch(MemoryBus(), MemoryStore(), chosen, PACE, True, 1).policy
    state, lengths = DispatchState(version=V4), LengthHistory()
    for number, length in enumerate(LENGTHS):
        state.apply_admitted(Admitted(number, 0, (f"{number}.0",), 60.0, Address(0, number)))
        tokens = np.array([number], np.uint32)
        prompt = Prompt(number, "automaton", tokens, 1, Sampling(tokens_max=4096), seed=0)
        state.groups[number].prompt = prompt
        lengths.note(prompt, length)
    drains = status("a", version=V3, health="draining", running=1, quota_left=0)
    state.apply_status(drains, now_s=0.0)
    state.apply_assignment(
        Assignment(
            "start", "0.0", 0, 0, 1, "a", 1, Version(0, 0), "automaton", np.zeros(1, np.uint32),
            Sampling(), 0, predicted=predicted,
        )
    )  # fmt: skip
    state.apply_partial(partial("0.0", 1, tokens=100), Address(0, 1))
    return [one.record.trajectory for one in planner.plan(state, lengths, (), 0.0)]


def test_a_short_sample_is_assigned_beside_a_long_answer_and_a_long_one_is_not() -> None:
    assert planned(predicted=900) == ["1.0"]


def test_nothing_is_assigned_beside_an_answer_that_is_nearly_done_or_unknown() -> None:
    assert planned(predicted=160) == []
    assert planned(predicted=0) == []


def test_it_is_off_by_default_and_without_expected_lengths() -> None:
    assert not DispatchSettings().fill_tails
    assert planned(900, fill_tails=False) == []
    assert planned(900, placement="room") == []


def test_an_answer_longer_than_predicted_is_expected_to_double_up_to_its_limit() -> None:
    assert tokens_left(900, 100, 4096) == 800
    assert tokens_left(50, 200, 4096) == 200
    assert tokens_left(50, 3000, 4096) == 1096
    assert tokens_left(0, 200, 4096) == 0


@pytest.mark.parametrize(("predicted", "fits"), [(0, False), (100, True), (101, False)])
def test_an_answer_fits_with_half_as_much_again_in_reserve(predicted: int, fits: bool) -> None:
    assert fits_tail(predicted, 150) == fits
