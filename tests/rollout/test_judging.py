"""One outcome per attempt at a trajectory, whatever the pool still returns for earlier attempts."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.ended_turns import ContinuedTurn, EndedTurns
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.settings import TaskSettings
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Version
from testbed.waiting import wait_for
from tests.rollout.test_growing import ORDER, emission

SCRIPT = '{"script": [7, 5, 9]}'


def running_trajectory(attempt: int, reference: str = '{"answer": "031"}') -> RunningTrajectory:
    one = RunningTrajectory.start(replace(ORDER, attempt=attempt, reference=reference), None, 0.0)
    one.extend(emission(2, 0))
    return one


@pytest.fixture
def judging_of():
    pools: list[RewardPool] = []

    def make(name: str, *, dialogue: bool = False, late: bool = False) -> EndedTurns:
        pools.append(RewardPool(TaskSettings(name=name)))
        return EndedTurns(pools[-1], dialogue, 1, lambda: Version(3, 1), late=late)

    yield make
    for pool in pools:
        pool.close()


def decided(judging: EndedTurns, is_over: Callable[[], bool]) -> list[Trajectory | ContinuedTurn]:
    """Returns all outcomes until the end (bounded)."""
    found: list[Trajectory | ContinuedTurn] = []

    def is_polled_to_the_end() -> bool:
        found.extend(judging.poll())
        return is_over()

    if not is_over():
        wait_for(is_polled_to_the_end)
    return found


def test_a_verdict_on_an_earlier_attempt_is_ignored(judging_of):
    """The given-up attempt is answered first, and must not end the resumed one."""
    judging = judging_of("remainder")
    judging.submit(running_trajectory(1), "stop")
    judging.submit(running_trajectory(2), "length")
    found = decided(judging, lambda: not len(judging))
    assert [(one.attempt, one.finish) for one in found if isinstance(one, Trajectory)] == [
        (2, "length")
    ]


def test_a_reply_to_an_earlier_attempt_is_not_appended_to_the_next(judging_of):
    judging = judging_of("scripted", dialogue=True)
    judging.submit(running_trajectory(1, SCRIPT), "stop")
    second = running_trajectory(2, SCRIPT)
    judging.drop("3.1")  # dispatch assigned the second attempt
    judging.submit(second, "stop")
    found = decided(judging, lambda: not len(judging))
    assert [type(one) for one in found] == [ContinuedTurn]
    assert second.environment == "2"
    assert judging.poll() == []


def test_a_late_reward_is_left_to_a_scorer_and_starts_no_process(judging_of):
    judging = judging_of("no_such_task", late=True)
    judging.submit(running_trajectory(1), "stop")
    assert judging.holds("3.1")
    (record,) = judging.poll()
    assert isinstance(record, Trajectory)
    assert (record.reward, record.finish, record.reference) == (None, "stop", '{"answer": "031"}')
    assert not len(judging)
    assert judging.rewards.poll() == []


def test_a_released_answer_is_dropped_with_late_rewards_too(judging_of):
    judging = judging_of("remainder", late=True)
    judging.submit(running_trajectory(1), "stop")
    judging.drop("3.1")
    assert judging.poll() == []


def test_a_dialogue_that_is_over_is_published_unjudged_with_late_rewards(judging_of):
    judging = judging_of("scripted", dialogue=True, late=True)
    one = running_trajectory(1, SCRIPT)
    one.extend_environment(np.array([9], np.uint32), "3")  # all three digits were named
    one.extend(emission(2, 0))
    judging.submit(one, "stop")
    (record,) = decided(judging, lambda: not len(judging))
    assert isinstance(record, Trajectory)
    assert (record.reward, record.environment) == (None, "")


def test_a_reply_longer_than_the_context_is_cut_where_it_enters(judging_of):
    """The record holds what the engine holds; with no room left the answer is scored as it is."""
    judging = judging_of("scripted", dialogue=True)
    one = running_trajectory(1, SCRIPT)
    judging.context_max = one.length + 1
    judging.submit(one, "stop")
    (record,) = decided(judging, lambda: not len(judging))
    assert isinstance(record, Trajectory)
    assert (len(record.tokens), record.finish) == (judging.context_max, "length")
