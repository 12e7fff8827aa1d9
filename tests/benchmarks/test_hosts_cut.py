"""The arithmetic of `benchmarks hosts`, from samples and a log made by hand."""

import pytest

from benchmarks.hosts.cut import Cut, back_s, idle_share, possible_tokens, slot_speed
from testbed.hosts.run import RolloutSample

CUT = Cut(100.0, 160.0)


def sampled(running: float, speed: float, *moments: float) -> list[RolloutSample]:
    """Two slots of which so many run, each at this speed."""
    return [RolloutSample(t, 2.0, running, (t - 80.0) * running * speed) for t in moments]


def test_the_speed_of_a_slot_is_that_of_one_that_runs():
    assert slot_speed(sampled(2.0, 10.0, 80.0, 90.0, 100.0)) == pytest.approx(10.0)


def test_each_answer_is_generated_in_one_slot_within_the_time():
    assert possible_tokens([100, 100, 100], 2, 10.0, 60.0) == 300
    assert possible_tokens([900, 10, 10], 2, 10.0, 60.0) == 620, "the long one is cut off"
    assert possible_tokens([], 2, 10.0, 60.0) == 0


def test_a_rollout_without_queued_work_is_not_idle_by_its_own_fault():
    idle = [RolloutSample(t, 2.0, 0.0, 400.0) for t in (130.0, 160.0)]
    samples = {"b1": sampled(2.0, 10.0, 80.0, 90.0, 100.0) + idle}
    assert idle_share(samples, [], CUT, 20.0) == 0.0


def test_all_slots_are_back_when_every_host_has_said_so():
    before, empty = sampled(2.0, 10.0, 90.0, 159.0), sampled(0.0, 10.0, 161.0)
    first, late = sampled(2.0, 10.0, 163.0, 170.0), sampled(2.0, 10.0, 168.0)
    assert back_s({"b1": before + empty + first, "b2": before + late}, CUT) == pytest.approx(8.0)
    assert back_s({"b1": before + first, "b2": before}, CUT) == float("inf")
