"""Episodes that fail and are tried again, and requests for episodes that have ended: in each case
the log decides.
"""

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.settings import TaskSettings
from rollstream.streams.bus import Bus
from rollstream.streams.records import Annotation, Partial
from rollstream.streams.writer import FencedWriter
from testbed.agents.process import records
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment, resumed
from testbed.waiting import wait_for
from tests.agents.held_bus import HeldBus

RETRIES = TaskSettings(retries=1)


def send(
    rollout: AgentRollout, method: str, path: str, body: object, key: str = ""
) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key or rollout.key()}"}
    return httpx2.request(method, rollout.url + path, json=body, headers=headers, timeout=60)


def ask(rollout: AgentRollout, text: str = "hello", key: str = "") -> httpx2.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return send(rollout, "POST", "/v1/chat/completions", body, key)


def end(rollout: AgentRollout, body: object, key: str = "") -> int:
    return send(rollout, "DELETE", "/sessions/0.0", body, key).status_code


def test_a_failed_episode_runs_again_without_its_turns_and_samples_equal_tokens(bus: Bus):
    settings = AgentSettings(episode="tests.agents.programs:flaky")
    with agent_rollout(bus, settings=settings, task=RETRIES) as rollout:
        rollout.assign(assignment())
        (record,) = rollout.finished()
        assert rollout.agents.counts.retried == 1
    assert record.finish != "dead"
    assert [reason[:30] for reason in record.failures] == ["agent: ValueError at programs."]
    assert len(record.turns) == 2
    assert not record.branches
    first, *rest = [one for one in records(bus, "partials") if isinstance(one, Partial)]
    again = next(one for one in rest if len(one.tokens))
    assert first.tokens.tolist() == again.tokens.tolist()


def test_the_last_failure_ends_the_episode_and_the_record_has_them_all(bus: Bus):
    settings = AgentSettings(episode="tests.agents.programs:failing")
    with agent_rollout(bus, settings=settings, task=TaskSettings(retries=2)) as rollout:
        rollout.assign(assignment())
        (record,) = rollout.finished()
    assert record.finish == "dead"
    assert len({*record.failures, record.reason}) == 1
    assert len(record.failures) == 2


def test_an_episode_that_is_out_of_turns_is_not_tried_again(bus: Bus):
    settings = AgentSettings(episode="tests.agents.programs:two_turns", turns_max=1)
    with agent_rollout(bus, settings=settings, task=RETRIES) as rollout:
        rollout.assign(assignment())
        (record,) = rollout.finished()
    assert record.reason.startswith("agent: turns_max of 1 reached; BadRequestError")
    assert not record.failures


def test_a_retry_survives_a_kill_and_its_failed_program_is_refused(bus: Bus):
    order = assignment()
    with agent_rollout(bus, task=RETRIES) as rollout:
        rollout.assign(order)
        failed_key = rollout.key()
        assert ask(rollout).status_code == 200
        assert end(rollout, {"failed": "the site was down"}) == 204
        assert ask(rollout, key=failed_key).status_code == 409
        first = ask(rollout).json()
        rollout.kill()
    again = resumed(bus, order, rollout_term=2)
    with agent_rollout(bus, term=2, task=RETRIES) as rollout:
        rollout.assign(again)
        assert ask(rollout, key=failed_key).status_code == 409
        assert ask(rollout).json()["choices"] == first["choices"]
        assert end(rollout, {"reward": 1.0}) == 204
        (record,) = rollout.finished()
    assert (len(record.turns), record.reward) == (1, 1.0)
    assert record.failures == ("agent: failed: the site was down",)


def test_the_end_and_the_reward_of_an_ended_episode_repeat_also_on_a_restarted_rollout(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        key = rollout.key()
        assert ask(rollout).status_code == 200
        assert end(rollout, {"reward": 0.5}) == 204
        rollout.finished()
        rollout.kill()
    wait_for(lambda: records(bus, "trajectories"))
    with agent_rollout(bus, term=2) as rollout:
        assert end(rollout, {"reward": 0.5}, key) == 204
        assert end(rollout, {}, key) == 204
        assert end(rollout, {"reward": 0.25}, key) == 409
        assert end(rollout, {"failed": "no"}, key) == 409
        path = "/sessions/0.0/reward"
        assert send(rollout, "POST", path, {"reward": 0.5}, key).status_code == 204
        assert send(rollout, "POST", path, {"reward": 1.0}, key).status_code == 409
        assert ask(rollout, key=key).status_code == 409


def test_an_open_episode_that_a_restarted_rollout_has_not_yet_is_asked_for_again(bus: Bus):
    order = assignment()
    dispatch = FencedWriter(bus, "assignments", "dispatch", 1)
    dispatch.open()
    dispatch.append([(order.trajectory, order)])
    with agent_rollout(bus) as rollout:
        rollout.assign(order)
        key = rollout.key()
        rollout.kill()
    with agent_rollout(bus, term=2) as rollout:
        assert ask(rollout, key=key).status_code == 503
        assert end(rollout, {}, key) == 503
        dispatch.append([(order.trajectory, assignment(kind="release"))])
        assert ask(rollout, key=key).status_code == 409


def test_a_late_reward_of_an_ended_episode_is_an_annotation(bus: Bus):
    with agent_rollout(bus, task=TaskSettings(reward="late")) as rollout:
        rollout.assign(assignment())
        key = rollout.key()
        assert ask(rollout).status_code == 200
        assert end(rollout, {}) == 204
        wait_for(lambda: records(bus, "trajectories"))
        found = send(rollout, "POST", "/sessions/0.0/reward", {"reward": 0.75}, key)
        assert found.status_code == 204
    (note,) = records(bus, "annotations")
    assert isinstance(note, Annotation)
    assert (note.trajectory, note.name, note.values.tolist()) == ("0.0", "reward", [0.75])


@pytest.mark.parametrize("body", [{"reward": 1.0}, {"failed": "cancelled"}])
def test_an_end_while_the_turn_before_is_on_its_way_to_the_log_waits_for_it(bus: Bus, body):
    held = HeldBus(bus, "partials")
    with agent_rollout(held, task=RETRIES) as rollout, ThreadPoolExecutor(2) as threads:  # type: ignore
        rollout.assign(assignment())
        key = rollout.key()
        asked = threads.submit(ask, rollout)
        wait_for(lambda: rollout.failures or rollout.agents.open["0.0"].running.flushing)
        ended = threads.submit(end, rollout, body, key)
        wait_for(lambda: rollout.failures or rollout.agents.inbox._waiting or ended.done())  # type: ignore
        held.go.set()
        assert asked.result().status_code == 200
        assert ended.result() == 204
        assert not rollout.failures
