"""When a rollout takes new weights: three policies, one rule each
(docs/how-to/choose-lag-and-loss.md).
"""

import pytest

from rollstream.producers.rollout.assignments import (
    UpdateInputs,
    is_draining,
    may_draw,
    quota_left,
    wants_update,
)

IN_FLIGHT = ("in_flight", "in_flight_recompute")


def load(**changed: int) -> UpdateInputs:
    values = {"held": 1, "newest": 1, "drawn": 0, "quota": 4, "busy": 2, "needed": 0}
    return UpdateInputs(**(values | changed))


@pytest.mark.parametrize("mode", IN_FLIGHT)
def test_in_flight_swaps_while_busy_as_soon_as_a_newer_version_is_out(mode):
    assert wants_update(mode, load(newest=2))
    assert not wants_update(mode, load(newest=1))


def test_keep_version_swaps_only_when_empty():
    assert not wants_update("keep_version", load(newest=2, busy=1))
    assert wants_update("keep_version", load(newest=2, busy=0))


def test_keep_version_draws_its_quota_under_an_old_version_and_no_more():
    assert may_draw("keep_version", load(newest=2, drawn=3))
    assert not may_draw("keep_version", load(newest=2, drawn=4))
    assert is_draining("keep_version", load(newest=2, drawn=4))


def test_keep_version_draws_on_while_no_newer_version_is_out():
    assert may_draw("keep_version", load(newest=1, drawn=100))
    assert not is_draining("keep_version", load(newest=1, drawn=100))


def test_an_assignment_that_needs_a_newer_version_waits_and_makes_keep_version_drain():
    assert not may_draw("keep_version", load(newest=2, needed=2))
    assert is_draining("keep_version", load(newest=2, needed=2))
    assert not may_draw("in_flight", load(newest=2, needed=2))
    assert may_draw("in_flight", load(held=2, newest=2, needed=2))


def test_the_quota_left_never_falls_below_zero():
    assert quota_left("keep_version", load(drawn=9)) == 0
    assert quota_left("in_flight", load(drawn=9)) == 4
