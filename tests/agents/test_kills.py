"""A rollout that is killed while programs ask: they see late answers, and each turn is sampled
once.
"""

from pathlib import Path

import pytest

from testbed.agent_process import killed_episodes


@pytest.mark.slow
def test_killed_rollouts_lose_no_answer_and_sample_none_again(tmp_path: Path):
    found = killed_episodes(tmp_path, kills=3, seed=1, episodes=3, turns=6)
    assert found.kills == 3
    assert found.turns == 18
    assert found.wrong == 0, found
