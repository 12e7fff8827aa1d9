"""Processes that are killed while programs ask: they see late answers, each turn is sampled once,
and no episode is lost.
"""

from pathlib import Path

import pytest

from testbed.agents.process import killed_episodes
from testbed.agents.run import killed_run
from testbed.servers import bubblewrap


@pytest.mark.slow
def test_killed_rollouts_lose_no_answer_and_sample_none_again(tmp_path: Path):
    found = killed_episodes(tmp_path, kills=3, seed=1, episodes=3, turns=6)
    assert found.kills == 3
    assert found.turns == 36  # in two conversations of each episode
    assert found.wrong == 0, found


@pytest.mark.long
@pytest.mark.parametrize("is_service", [True, False])
def test_a_run_of_agents_loses_nothing_to_kills_of_each_of_its_processes(
    tmp_path: Path, is_service: bool
):
    bubblewrap.program()
    found = killed_run(tmp_path, kills=4, seed=1, service=is_service)
    assert found.kills.total() == 4
    assert found.answers
    assert found.wrong == 0, found
