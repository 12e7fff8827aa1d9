"""Groups that end untrained one after the other end the run, however they end."""

import pytest

from rollstream.consumers.trainer.data.ready_groups import UNTRAINED_MAX, UntrainedGroups
from rollstream.errors import ConfigurationError, EveryGroupDied
from rollstream.streams.records import GroupClosed

FILTERED = GroupClosed(7, "filtered", "all rewards are 0", 1)


def test_a_run_whose_groups_are_all_filtered_ends_and_names_the_reward() -> None:
    groups = UntrainedGroups()
    groups.check([FILTERED] * (UNTRAINED_MAX["filtered"][0] - 1), False, 2)
    with pytest.raises(ConfigurationError, match=r"1024 groups in a row ended filtered.*are 0"):
        groups.check([FILTERED], False, 2)


def test_one_group_that_can_be_trained_begins_the_count_again() -> None:
    groups = UntrainedGroups()
    for _ in range(3):
        groups.check([FILTERED] * 1000, False, 2)
        groups.check([FILTERED] * 1000, True, 2)


@pytest.mark.parametrize("reason", ["dead", "expired"])
def test_a_cause_that_may_pass_is_no_refusal(reason) -> None:
    closed = [GroupClosed(n, reason, "too late", 1) for n in range(UNTRAINED_MAX[reason][0])]
    with pytest.raises(EveryGroupDied, match=f"ended {reason}.*too late"):
        UntrainedGroups().check(closed, False, 1)


def test_large_steps_have_a_bound_in_steps() -> None:
    UntrainedGroups().check([FILTERED] * 2000, False, 100)
