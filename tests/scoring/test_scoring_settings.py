"""Scorers in the configuration: their processes, the settings that may change between two starts,
and refused settings.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.config.config import load
from rollstream.config.run_folder import RunFolder
from rollstream.errors import ConfigurationError
from rollstream.supervisor.plan import process_specs
from testbed.repository import EXAMPLES

EXAMPLE = EXAMPLES / "late-reward.toml"


def seats(*overrides: str) -> dict[str, list[str]]:
    configuration = load(EXAMPLE, overrides, {})
    return {s.name: list(s.command) for s in process_specs(configuration, RunFolder(Path("run")))}


def test_the_supervisor_starts_as_many_scorers_as_are_asked_for():
    assert [name for name in seats("scoring.count=2") if "scorer" in name] == [
        "scorer-0", "scorer-1"
    ]  # fmt: skip
    assert "score" in seats()["scorer-0"]
    assert not [name for name in seats("scoring.count=0") if "scorer" in name]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scoring.names=[]", "scoring.names in --set"),
        ("task.reward=sometime", "reward must be one of 'inline' or 'late', got 'sometime'"),
        ("trainer.reward_terms.quality=much", "quality must be a number, got 'much'"),
        ("scoring.cuont=1", "nearest known: scoring.count"),
    ],
)
def test_a_mistake_is_named(override: str, message: str):
    with pytest.raises(ConfigurationError) as caught:
        load(EXAMPLE, [override], {})
    assert message in str(caught.value)


def test_a_scorer_without_its_function_refuses_to_start(tmp_path: Path):
    """Exit 2 ends a supervised run with the message; the role is not restarted forever."""
    line = [sys.executable, "-m", "rollstream", "score", str(EXAMPLE), "--run", str(tmp_path)]
    line += ["--set", "scoring.function=examples.brevity:scor"]
    done = subprocess.run(line, cwd=EXAMPLE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no callable 'scor'; did you mean 'score'?" in done.stderr
