"""Programs that know nothing of Rollstream, each in a run of its own whose episodes are trained."""

import pytest

from benchmarks.agents.installing import programs
from benchmarks.agents.unchanged import QUICK_EPISODES, outcome

FAST = "curl (shell)"  # needs no libraries


@pytest.mark.slow
def test_a_shell_script_is_trained_unchanged():
    assert outcome(FAST, QUICK_EPISODES).is_clean


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in programs() if name != FAST])
def test_a_program_is_trained_unchanged(name: str):
    assert outcome(name, QUICK_EPISODES).is_clean
