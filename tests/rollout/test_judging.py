"""One outcome per attempt at a trajectory, whatever the pool still returns for earlier attempts."""

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.producers.agents.token_paths import extend_prompt
from rollstream.producers.engines.base import Engine
from rollstream.producers.environments.dialogue import Dialogue
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Tokens, Turn, Version
from testbed.waiting import wait_for
from tests.rollout.test_growing import ORDER, emission

SCRIPT = '{"script": [7, 5, 9]}'


def running_trajectory(attempt: int, reference: str = '{"answer": "031"}') -> RunningTrajectory:
    one = RunningTrajectory.start(replace(ORDER, attempt=attempt, reference=reference), None, 0.0)
    one.extend(emission(2, 0))
    return one


def test_two_answers_to_one_prompt_are_two_turns():
    running = RunningTrajectory.start(ORDER, None, 0.0, True)
    extend_prompt(running, np.array([5, 6], np.uint32), -1)
    end = running.length - 1
    running.extend(emission(2, 0))
    extend_prompt(running, np.array([], np.uint32), end)
    running.extend(emission(3, 0))
    assert running.judged_turns() == [[0, 1], [0, 1, 2]]
    turns = [Turn("", "", 0, 2, 4, "stop", 0.0, 0.0), Turn("", "", 4, 4, 7, "stop", 0.0, 0.0)]
    running.turns, running.abandoned = turns, (0,)
    assert running.judged_turns() == [[0, 1, 2]]


@pytest.fixture
def judging_of():
    pools: list[RewardPool] = []

    def make(name: str, *, late: bool = False) -> Judging:
        pools.append(RewardPool(TaskSettings(name=name)))
        return Judging(pools[-1], 1, lambda: Version(3, 1), late=late)

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def dialogue_of(judging_of):
    def make(*, late: bool = False, context_max: int = 512) -> Dialogue:
        engine = cast("Engine", _Engine())
        settings = RolloutSettings(context_max=context_max)
        judging = judging_of("scripted", late=late)
        # No partial is published here.
        parts = RolloutParts(engine, judging, cast("RolloutPublisher", None), settings)
        return Dialogue(parts)

    return make


class _Engine:
    """Notes what is appended."""

    def __init__(self) -> None:
        self.appended: list[list[int]] = []

    def append(self, trajectory: str, tokens: Tokens) -> None:
        self.appended.append(tokens.tolist())

    def abort(self, trajectory: str) -> None: ...


def ended(of: Judging | Dialogue, is_over: Callable[[], bool]) -> list[Trajectory]:
    """Returns all records until the end (bounded)."""
    records: list[Trajectory] = []

    def is_polled_to_the_end() -> bool:
        records.extend(of.poll())
        return is_over()

    if not is_over():
        wait_for(is_polled_to_the_end)
    return records


def test_a_verdict_on_an_earlier_attempt_is_ignored(judging_of):
    """The given-up attempt is answered first, and must not end the resumed one."""
    judging = judging_of("remainder")
    judging.judge(running_trajectory(1), "stop")
    judging.judge(running_trajectory(2), "length")
    records = ended(judging, lambda: not len(judging))
    assert [(one.attempt, one.finish) for one in records] == [(2, "length")]


def test_a_reply_to_an_earlier_attempt_is_not_appended_to_the_next(dialogue_of):
    dialogue = dialogue_of()
    dialogue.end_turn(running_trajectory(1, SCRIPT), "stop")
    second = running_trajectory(2, SCRIPT)
    dialogue.drop("3.1")  # dispatch assigned the second attempt
    dialogue.end_turn(second, "stop")
    assert ended(dialogue, lambda: not dialogue.awaited) == []
    assert (second.environment, dialogue.running) == ("2", {"3.1": second})
    assert len(dialogue.parts.engine.appended) == 1
    assert dialogue.poll() == []


def test_a_late_reward_is_left_to_a_scorer_and_starts_no_process(judging_of):
    judging = judging_of("no_such_task", late=True)
    judging.judge(running_trajectory(1), "stop")
    assert len(judging) == 1
    (record,) = judging.poll()
    assert (record.reward, record.finish, record.reference) == (None, "stop", '{"answer": "031"}')
    assert not len(judging)
    assert judging.rewards.poll() == []


def test_a_released_answer_is_dropped_with_late_rewards_too(judging_of):
    judging = judging_of("remainder", late=True)
    judging.judge(running_trajectory(1), "stop")
    judging.drop("3.1")
    assert judging.poll() == []


def test_a_dialogue_that_is_over_is_published_unjudged_with_late_rewards(dialogue_of):
    dialogue = dialogue_of(late=True)
    one = running_trajectory(1, SCRIPT)
    one.extend_environment(np.array([9], np.uint32), "3")  # all three digits were named
    one.extend(emission(2, 0))
    dialogue.end_turn(one, "stop")
    (record,) = ended(dialogue, lambda: not dialogue.awaited)
    assert (record.reward, record.environment) == (None, "")


def test_a_reply_longer_than_the_context_is_cut_where_it_enters(dialogue_of):
    """The record holds what the engine holds; with no room left the answer is scored as it is."""
    one = running_trajectory(1, SCRIPT)
    dialogue = dialogue_of(context_max=one.length + 1)
    dialogue.end_turn(one, "stop")
    (record,) = ended(dialogue, lambda: not dialogue.awaited)
    assert (len(record.tokens), record.finish) == (dialogue.parts.settings.context_max, "length")
