"""Programs that run episodes: functions and commands, their rewards and their failures."""

import sys
from pathlib import Path

import pytest

from rollstream.producers.agents.settings import AgentSettings
from rollstream.producers.settings import SandboxSettings, TaskSettings
from rollstream.streams.bus import Bus
from rollstream.streams.records import Trajectory
from testbed.agents.rollout import agent_rollout, assignment


def ended(bus: Bus, **settings) -> Trajectory:
    """Returns the record of one episode under these settings."""
    with agent_rollout(bus, settings=AgentSettings(**settings)) as rollout:
        rollout.in_loop(lambda: rollout.in_progress.start(assignment()))
        (record,) = rollout.finished()
    assert isinstance(record, Trajectory), record
    return record


def function(name: str) -> str:
    return f"tests.agents.programs:{name}"


def test_a_function_runs_an_episode_and_returns_its_reward(bus: Bus):
    record = ended(bus, episode=function("two_turns"))
    assert record.finish == "length"
    assert record.reward in (0.0, 0.5, 1.0)
    assert len(record.turns) == 2
    assert not record.branches


def test_a_function_opens_sandboxes_with_the_settings_of_the_task(bus: Bus):
    task = TaskSettings(sandbox=SandboxSettings(time_s=7.5))
    settings = AgentSettings(episode=function("sandbox_limit"))
    with agent_rollout(bus, settings=settings, task=task) as rollout:
        rollout.in_loop(lambda: rollout.in_progress.start(assignment()))
        (record,) = rollout.finished()
    assert record.reward == 7.5


@pytest.mark.parametrize(
    ("name", "limits", "reason"),
    [
        ("failing", {}, "agent: ValueError at programs.py:"),
        ("hanging", {"episode_s": 0.5}, "agent: took longer than 0.5 s"),
        ("silent", {}, "agent: its program ended without a turn"),
    ],
)
def test_an_episode_that_fails_is_a_dead_record_with_the_reason(bus: Bus, name, limits, reason):
    record = ended(bus, episode=function(name), **limits)
    assert record.finish == "dead"
    assert record.reason.startswith(reason)


SHELL = """
ask() { curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}], \\"max_tokens\\": 4}"; }
ask hello >/dev/null || exit 3
curl -sf -X POST "$ROLLSTREAM_SESSION/reward" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d '{"reward": 0.25, "scores": {"tries": 2}}' || exit 4
"""


def test_a_shell_script_runs_an_episode_and_posts_its_reward(bus: Bus):
    record = ended(bus, command=("bash", "-c", SHELL))
    assert (record.finish, record.reward, record.scores) == ("length", 0.25, {"tries": 2.0})


def test_a_command_that_fails_ends_the_episode_with_its_exit_code(bus: Bus):
    record = ended(bus, command=(sys.executable, "-c", "import sys; sys.exit(5)"))
    assert record.reason == "agent: exit code 5"


def test_a_program_has_no_credentials_of_the_run(bus: Bus, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    found = tmp_path / "environment"
    ended(bus, command=("bash", "-c", f"env > {found}; exit 1"))
    names = {line.partition("=")[0] for line in found.read_text().splitlines()}
    assert {"OPENAI_API_KEY", "OPENAI_BASE_URL", "ROLLSTREAM_TASK"} <= names
    assert "AWS_SECRET_ACCESS_KEY" not in names
