"""Programs that run episodes: functions and commands, their rewards and their failures."""

import json
import sys
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents import programs
from rollstream.producers.agents.program_process import EpisodeOrder
from rollstream.producers.settings import SandboxSettings, TaskSettings
from rollstream.program_output import EPISODE_BYTES, ProgramOutput
from rollstream.streams.bus import Bus
from rollstream.streams.records import Trajectory
from testbed.agents.rollout import agent_rollout, assignment
from testbed.waiting import wait_for


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


FAILURES = {
    "failing": "agent: ValueError at programs.py:",
    "silent": "agent: its program ended without a turn",
    "leaving": "agent: SystemExit at programs.py:",
    "cancelled": "agent: CancelledError at programs.py:",
    "beyond": "agent: the returned reward is",
    "lettered": "agent: the returned reward is a str",
    "mute": "agent: Mute at programs.py:",
    "halved": "agent: ValueError at programs.py:",
    "misscored": "agent: the returned scores has the name ''",
}
"""By function the begin of the reason with which its episode ends."""


def test_episodes_that_fail_are_dead_records_with_their_reasons(bus: Bus):
    """They run in one process, one after the other: none ends it."""
    settings = AgentSettings(episode=function("named"))
    names = list(FAILURES)
    with agent_rollout(bus, settings=settings) as rollout:
        for number, name in enumerate(names):
            rollout.assign(assignment(f"{number}.0", reference=name))
            wait_for(lambda number=number: rollout.failures or len(rollout.done) > number)
        assert not rollout.failures
        records = {names[record.group]: record for record in rollout.done}
    for name, reason in FAILURES.items():
        assert records[name].finish == "dead"
        assert records[name].reason.startswith(reason), name


def test_an_episode_may_close_its_client_and_return_scores(bus: Bus):
    settings = AgentSettings(episode=function("named"))
    with agent_rollout(bus, settings=settings) as rollout:
        for number, name in enumerate(("closing", "scored")):
            rollout.assign(assignment(f"{number}.0", reference=name))
            wait_for(lambda number=number: rollout.failures or len(rollout.done) > number)
        outcomes = [(one.reward, one.scores) for one in rollout.done]
    assert outcomes == [(1.0, {}), (0.5, {"steps": 3.0})]


def test_a_machine_without_the_sandbox_ends_the_run():
    running = programs.FunctionPrograms(function("unsandboxed"), 1)
    try:
        running.start(EpisodeOrder("0.0", "http://127.0.0.1:1/v1", "", {}))
        with pytest.raises(ConfigurationError, match="no program `bwrap`"):
            wait_for(running.poll)
    finally:
        running.close()


@pytest.mark.parametrize(
    ("given", "task"),
    [
        (("Q", '"R"'), {"prompt": "Q", "reference": "R"}),
        (("Q", '"R"', "dataset", "S"), {"prompt": "Q", "reference": "R", "system": "S"}),
        (
            ("Q", json.dumps({"part": "a", "of": '"R"'}), "a"),
            {"prompt": "Q", "reference": "R", "part": "a"},
        ),
        (("Q", '{"part": "a"}', "a"), {"prompt": "Q", "reference": {"part": "a"}}),
    ],
)
def test_a_program_gets_the_reference_of_its_part(given: tuple[str, ...], task: dict[str, object]):
    assert programs.task_of(*given) == task


def test_an_episode_that_takes_too_long_is_a_dead_record(bus: Bus):
    record = ended(bus, episode=function("hanging"), episode_s=0.5)
    assert record.finish == "dead"
    assert record.reason.startswith("agent: took longer than 0.5 s")


SHELL = """
ask() { curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}], \\"max_tokens\\": 4}"; }
ask hello >/dev/null || exit 3
curl -sf -X POST "$ROLLSTREAM_SESSION/reward" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d '{"reward": 0.25, "scores": {"tries": 2}}' || exit 4
"""


def test_an_episode_that_blocks_its_process_ends_none_of_the_later_ones(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(programs, "BLOCKED_S", 0.2)
    settings = AgentSettings(episode=function("named"), episode_s=0.5)
    with agent_rollout(bus, settings=settings, task=TaskSettings(retries=1)) as rollout:
        rollout.assign(assignment("0.0", reference="blocking"))
        wait_for(lambda: rollout.failures or len(rollout.done) > 0)
        rollout.assign(assignment("1.0", reference="two_turns"))
        wait_for(lambda: rollout.failures or any(one.finish != "dead" for one in rollout.done))
        assert not rollout.failures
    assert "programs.py" in capfd.readouterr().err  # the line that blocks


def test_a_process_that_still_imports_is_not_taken_for_blocked():
    process = programs.FunctionProcess(function("named"), (), "")
    try:
        process.cancelled["0.0"] = 0.0
        process.end_if_blocked(now=1e9)
        assert process.aborted_s is None
        process.ready_s = 1e9
        process.end_if_blocked(now=1e9 + programs.BLOCKED_S)
        assert process.aborted_s is None
        process.end_if_blocked(now=1e9 + programs.BLOCKED_S + 1)
        assert process.aborted_s is not None
    finally:
        process.end()


def test_a_shell_script_runs_an_episode_and_posts_its_reward(bus: Bus):
    record = ended(bus, command=("bash", "-c", SHELL))
    assert (record.finish, record.reward, record.scores) == ("length", 0.25, {"tries": 2.0})


def test_a_command_that_ends_its_session_gets_the_answer_and_finishes(bus: Bus, tmp_path: Path):
    log = tmp_path / "log"
    text = f"""{SHELL.partition("curl -sf -X POST")[0]}
curl -sf -X DELETE "$ROLLSTREAM_SESSION" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -d '{{"reward": 0.7}}' -w '%{{http_code}}' > {log}
echo ' cleaned up' >> {log}
"""
    settings = AgentSettings(command=("bash", "-c", text))
    with agent_rollout(bus, settings=settings) as rollout:
        rollout.in_loop(lambda: rollout.in_progress.start(assignment()))
        (record,) = rollout.finished()
        assert record.reward == pytest.approx(0.7)
        wait_for(lambda: "cleaned up" in log.read_text())
    assert log.read_text() == "204 cleaned up\n"


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


def test_a_task_too_large_for_a_program_ends_its_episode_alone(bus: Bus):
    """The system refuses a variable of more than 128 KiB."""
    settings = AgentSettings(command=(sys.executable, "-c", "raise SystemExit(0)"))
    with agent_rollout(bus, settings=settings) as rollout:
        rollout.assign(assignment(reference="x" * (1 << 18)))
        rollout.assign(assignment("1.0"))
        wait_for(lambda: rollout.failures or len(rollout.done) == 2)
        reasons = {record.trajectory: record.reason for record in rollout.done}
    assert reasons["0.0"].startswith("agent: its program cannot be started: ")
    assert reasons["1.0"] == "agent: its program ended without a turn"


def test_what_a_command_prints_is_printable_and_bounded_in_the_log(
    bus: Bus, capfd: pytest.CaptureFixture[str]
):
    prints = "print('\\x1b[2Jclear'); [print('x' * 99) for _ in range(20_000)]"
    ended(bus, command=(sys.executable, "-c", prints))
    log = capfd.readouterr().err
    assert "\\u001b[2Jclear" in log
    assert "\x1b" not in log
    assert len(log) < 2 * EPISODE_BYTES
    assert "bytes of a program's output left out" in log


def test_each_episode_has_room_and_what_was_left_out_of_the_one_before_is_stated():
    lines: list[bytes] = []
    output = ProgramOutput(lines.append, room=6)
    output.take(b"first\nsecond\nthi")
    output.allow()
    output.take(b"rd\nlast")
    output.end()
    assert lines[0] == b"first\n"
    assert b" bytes of a program's output left out" in lines[1]
    assert lines[-1] == b"last\n"
