"""Programs that are started again after a kill and take another way: the turns that they no longer
reach stay in the record, and are not trained (invariant 13).
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest

from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.import_path import module_environment
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.keys import SessionIdentity
from rollstream.producers.agents.programs import EpisodeOrder, ServicePrograms
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.bus import Bus
from rollstream.streams.records import Partial, Trajectory
from testbed.agents.process import records
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment, resumed
from testbed.agents.run import killed_run
from testbed.servers import bubblewrap, free_ports
from testbed.waiting import wait_for
from tests.agents.held_bus import HeldBus


def ask(rollout: AgentRollout, *texts: str, key: str = "") -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    found = httpx2.post(
        f"{rollout.url}/v1/chat/completions",
        json={"model": "m", "messages": messages},
        headers={"authorization": f"Bearer {key or rollout.key()}"},
        timeout=60,
    )
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]["content"]


def end(rollout: AgentRollout, key: str = "", body: object = None) -> int:
    headers = {"authorization": f"Bearer {key or rollout.key()}"}
    body = {"reward": 1.0} if body is None else body
    url = f"{rollout.url}/sessions/0.0"
    return httpx2.request("DELETE", url, json=body, headers=headers, timeout=60).status_code


def killed_after_two_turns(bus: Bus) -> tuple[str, str]:
    """Runs a first attempt; returns its key and its first answer."""
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        key = rollout.key()
        first = ask(rollout, "hello")
        ask(rollout, "hello", first, "one way")
        rollout.kill()
    return key, first


def test_turns_that_the_restarted_program_does_not_reach_are_not_trained(bus: Bus):
    _, first = killed_after_two_turns(bus)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        assert ask(rollout, "hello") == first
        ask(rollout, "hello", first, "another way")
        assert end(rollout) == 204
        (record,) = rollout.finished()
        assert rollout.agents.counts.abandoned == 1
    assert record.abandoned == (1,)
    assert [turn.fork for turn in record.turns] == ["", "", "conversation"]
    assert refusal(record, TrainingBounds()) is None
    mask = sample_of(record, 1.0).mask
    counts = [turn.end - turn.generated for turn in record.turns]
    assert mask.tolist() == np.repeat([True, False, True], counts).tolist()


def test_abandoned_turns_leave_the_restarted_program_its_turns(bus: Bus):
    killed_after_two_turns(bus)
    settings = AgentSettings(service=True, turns_max=2)
    with agent_rollout(bus, term=2, settings=settings) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        first = ask(rollout, "quite another start")
        ask(rollout, "quite another start", first, "go on")
        body = {"model": "m", "messages": [{"role": "user", "content": "once more"}]}
        headers = {"authorization": f"Bearer {rollout.key()}"}
        url = f"{rollout.url}/v1/chat/completions"
        refused = httpx2.post(url, json=body, headers=headers, timeout=60)
        assert (refused.status_code, "turns_max" in refused.text) == (400, True)
        assert end(rollout) == 204
        (record,) = rollout.finished()
    assert (record.abandoned, len(record.turns)) == ((0, 1), 4)


def test_a_turn_that_is_only_continued_is_reached(bus: Bus):
    """A program that keeps its history itself does not ask for its first turns again."""
    _, first = killed_after_two_turns(bus)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        ask(rollout, "hello", first, "another way")
        assert end(rollout) == 204
        (record,) = rollout.finished()
    assert record.abandoned == (1,)


def test_a_service_that_keeps_its_key_abandons_nothing(bus: Bus):
    key, first = killed_after_two_turns(bus)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        ask(rollout, "hello", first, "another way", key=key)
        assert end(rollout, key) == 204
        (record,) = rollout.finished()
    assert not record.abandoned
    assert len(record.turns) == 3


def test_an_episode_is_found_by_its_service_as_soon_as_it_is_found_at_all(bus: Bus):
    """A service that repeats a request while the episode opens again is not told that another
    program has taken it.
    """
    killed_after_two_turns(bus)
    with agent_rollout(bus, term=2) as rollout:
        programs, found = rollout.agents.programs, list[object]()
        earlier = SessionIdentity("0.0", 1, "rollout-0", 1, 0)

        class Asked(ServicePrograms):
            def start(self, order: EpisodeOrder) -> None:
                found.append(rollout.agents.find(earlier))
                programs.start(order)
                found.append(rollout.agents.find(earlier))

        rollout.agents.programs = Asked()
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        assert found == [None, None]
        rollout.agents.programs = programs
        assert rollout.agents.find(earlier) is not None


def test_a_service_that_opened_a_later_attempt_keeps_what_it_abandoned(bus: Bus):
    killed_after_two_turns(bus)
    second = resumed(bus, assignment(), rollout_term=2)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(second)
        key = rollout.key()
        other = ask(rollout, "quite another start", key=key)
        rollout.kill()
    with agent_rollout(bus, term=3) as rollout:
        rollout.assign(resumed(bus, second, rollout_term=3))
        ask(rollout, "quite another start", other, "go on", key=key)
        assert end(rollout, key) == 204
        (record,) = rollout.finished()
    assert record.abandoned == (0, 1)


def test_an_end_that_is_in_the_log_keeps_the_abandoned_turns(bus: Bus):
    """Killed between the end that the program asked for and the episode's record."""
    _, first = killed_after_two_turns(bus)
    second, held = resumed(bus, assignment(), rollout_term=2), HeldBus(bus, "trajectories")
    with agent_rollout(held, term=2) as rollout:  # type: ignore
        rollout.assign(second)
        ask(rollout, "hello")
        ask(rollout, "hello", first, "another way")
        assert end(rollout) == 204
        rollout.kill()
        held.kill()
    with agent_rollout(bus, term=3) as rollout:
        rollout.assign(resumed(bus, second, rollout_term=3))
        (record,) = rollout.finished()
    assert (record.abandoned, record.reward) == ((1,), 1.0)


def test_an_episode_whose_restarted_program_asks_for_nothing_has_failed(bus: Bus):
    killed_after_two_turns(bus)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        assert end(rollout) == 204
        (record,) = rollout.finished()
    assert record.finish == "dead"
    assert record.reason == "agent: its program ended without a turn"


def test_a_program_that_is_started_again_sets_its_reward_again(bus: Bus):
    """The reward that the killed one had set judged another way."""
    script = 'curl -sf $ROLLSTREAM_SESSION/reward -H "Authorization: Bearer $OPENAI_API_KEY" '
    asks = (
        'curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
        '-d \'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}\''
    )
    first = ("bash", "-c", f"{asks} && {script} -d '{{\"reward\": 0.25}}' && sleep 600")
    with agent_rollout(bus, settings=AgentSettings(command=first)) as rollout:
        rollout.assign(assignment())
        wait_for(lambda: len([one for one in records(bus, "partials") if one.environment]))
        rollout.kill()
    again = AgentSettings(command=("bash", "-c", asks))
    with agent_rollout(bus, term=2, settings=again) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        (record,) = rollout.finished()
    assert record.reward != 0.25  # the task judged
    assert len(record.turns) == 1


PROGRAM = """
import json, os, sys, time, urllib.request
messages = [{"role": "user", "content": "hello"}]
def send(path, body):
    request = urllib.request.Request(path, json.dumps(body).encode(), method="POST", headers={
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()
for number in range(12):
    if number == 5 and not os.path.exists(sys.argv[1]):
        time.sleep(600)
    body = {"model": "m", "messages": messages}
    found = json.loads(send(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
    text = found["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text},
                 {"role": "user", "content": f"{number} of {os.getpid()}"}]
send(os.environ["ROLLSTREAM_SESSION"] + "/reward", {"reward": 0.5})
"""


def start(folder: Path, port: int, term: int) -> "subprocess.Popen[bytes]":
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "testbed.agents.process", str(folder), str(port), str(term)]
    return subprocess.Popen(
        [*command, "1", sys.executable, str(program), str(folder / "goes-on")],
        env={**os.environ, **module_environment()},
    )


@pytest.mark.slow
def test_a_killed_command_that_takes_another_way_has_its_turns_trained_once(
    bus: Bus, tmp_path: Path
):
    (port,) = free_ports(1)

    def answered() -> list[str]:
        found = [one for one in records(bus, "partials") if isinstance(one, Partial)]
        return [turn.digest for one in found for turn in one.turns]

    process = start(tmp_path, port, 1)
    wait_for(lambda: len(answered()) == 5, process)
    process.kill()
    process.wait()
    before = answered()
    (tmp_path / "goes-on").touch()
    process = start(tmp_path, port, 2)
    wait_for(lambda: records(bus, "trajectories"), process)
    process.kill()
    process.wait()
    (record,) = records(bus, "trajectories")
    assert isinstance(record, Trajectory)
    assert refusal(record, TrainingBounds()) is None
    assert record.abandoned == tuple(range(1, len(before)))
    assert [turn.digest for turn in record.turns[: len(before)]] == before
    assert len(record.turns) == len(before) + 11  # the first turn was repeated
    sample = sample_of(record, 1.0)
    counts = [turn.end - turn.generated for turn in record.turns]
    wanted = [number not in record.abandoned for number in range(len(counts))]
    assert sample.mask.tolist() == np.repeat(wanted, counts).tolist()


@pytest.mark.long
def test_a_run_whose_killed_programs_take_other_ways_is_audit_clean(tmp_path: Path):
    bubblewrap.program()
    found = killed_run(tmp_path, kills=4, seed=2, service=False, wanders=True)
    assert found.abandoned
    assert found.wrong == 0, found
