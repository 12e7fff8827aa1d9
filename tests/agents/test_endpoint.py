"""Turns over HTTP, with the real client of OpenAI."""

import numpy as np
import openai
import pytest
from openai import OpenAI

from rollstream.producers.agents.requests import RequestRefused, read_request
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.bus import Bus
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT
from rollstream.streams.values import Sampling
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment, resumed


def client_of(rollout: AgentRollout, key: str = "", retries: int = 0) -> OpenAI:
    return OpenAI(
        base_url=f"{rollout.url}/v1", api_key=key or rollout.key(), max_retries=retries, timeout=60
    )


def chat(client: OpenAI, *texts: str, **options):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return client.chat.completions.create(model="any", messages=messages, **options)  # type: ignore


def text_of(answer) -> str:
    return answer.choices[0].message.content


def test_an_episode_of_two_turns_becomes_one_trajectory(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        first = text_of(chat(client, "hello"))
        second = chat(client, "hello", first, "and now?", extra_body={"return_token_ids": True})
        episode = rollout.agents.open["0.0"]
        running = episode.running
        client.delete(f"{rollout.url}/sessions/0.0", cast_to=object, body={"reward": 0.5})
        (record,) = rollout.finished()
    assert record.reward == 0.5
    assert not record.branches
    assert refusal(record, TrainingBounds()) is None
    assert [turn.fork for turn in record.turns] == ["", ""]
    tokenizer = rollout.chat
    prompt = record.tokens[record.sources == PROMPT].tolist()
    assert prompt == tokenizer.encode("<|begin|><|user|>hello<|end|><|assistant|>")
    added = record.tokens[record.sources == ENVIRONMENT].tolist()
    assert added == tokenizer.encode("<|user|>and now?<|end|><|assistant|>")
    gained = record.tokens[record.turns[1].generated : record.turns[1].end].tolist()
    assert second.choices[0].token_ids == gained
    assert running.generated == int((record.sources == GENERATED).sum())


def test_a_repeated_request_gets_the_stored_answer_also_after_a_restart(bus: Bus):
    order = assignment()
    with agent_rollout(bus) as rollout:
        rollout.assign(order)
        first = chat(client_of(rollout), "hello")
        assert chat(client_of(rollout), "hello").model_dump() == first.model_dump()
        tokens = rollout.agents.open["0.0"].running.generated
        rollout.kill()
    again = resumed(bus, order, rollout_term=2)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(again)
        assert text_of(chat(client_of(rollout), "hello")) == text_of(first)
        assert rollout.agents.open["0.0"].running.generated == tokens
        assert rollout.agents.counts.repeated == 1
        second = chat(client_of(rollout), "hello", text_of(first), "next")
        assert second.usage is not None
        assert second.usage.completion_tokens >= 1


def test_an_outside_program_keeps_its_key_over_a_restart_until_another_takes_the_episode(bus: Bus):
    order = assignment()
    with agent_rollout(bus) as rollout:
        rollout.assign(order)
        key = rollout.key()
        first = text_of(chat(client_of(rollout, key), "hello"))
        rollout.kill()
    again = resumed(bus, order, rollout_term=2)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(again)
        assert text_of(chat(client_of(rollout, key), "hello")) == first
    with agent_rollout(bus, term=3) as rollout:
        rollout.assign(resumed(bus, again, rollout_term=3))
        chat(client_of(rollout), "hello", "not what was said", "go on")
        with pytest.raises(openai.ConflictError):
            chat(client_of(rollout, key), "hello")


def test_a_sealed_episode_and_a_wrong_key_are_refused(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        key = rollout.key()
        client = client_of(rollout, key)
        with pytest.raises(openai.AuthenticationError):
            chat(client_of(rollout, key[:-1] + ("A" if key[-1] != "A" else "B")), "hello")
        chat(client, "hello")
        client.delete(f"{rollout.url}/sessions/0.0", cast_to=object, body={"reward": 1})
        rollout.finished()
        with pytest.raises(openai.ConflictError):
            chat(client, "hello")


def test_a_stream_has_the_same_answer(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        whole = text_of(chat(client, "hello"))
        parts = list(chat(client, "hello", stream=True, stream_options={"include_usage": True}))
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole
        assert parts[-1].usage is not None
        assert parts[-2].choices[0].finish_reason == "stop"


def test_a_rewritten_history_forks_and_each_token_is_trained_once(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        first = text_of(chat(client, "hello"))
        chat(client, "hello", first, "one")
        chat(client, "hello", "I never said that", "two")
        chat(client, "quite another chat")
        chat(client, "hello", first, "again from the first answer")
        client.delete(f"{rollout.url}/sessions/0.0", cast_to=object, body={"reward": 1})
        (record,) = rollout.finished()
    causes = [turn.fork for turn in record.turns]
    assert causes == ["", "", "history_rewritten", "conversation", "conversation"]
    assert len(record.branches) == 3
    assert refusal(record, TrainingBounds()) is None
    assert rollout.agents.counts.forks == {"history_rewritten": 1, "conversation": 2}
    assert np.isfinite(record.logprobs).all()


@pytest.mark.parametrize(
    ("field", "advice"),
    [
        ({"functions": [{"name": "f"}]}, "send them as `tools`"),
        ({"continue_final_message": True}, "use /v1/completions"),
    ],
)
def test_what_would_change_the_prompt_and_is_not_served_is_refused(
    field: dict[str, object], advice: str
):
    body = {"messages": [{"role": "user", "content": "a"}], **field}
    with pytest.raises(RequestRefused, match=advice):
        read_request("chat", body, Sampling())


def test_a_parameter_that_no_answer_follows_is_named():
    body = {
        "messages": [{"role": "user", "content": "a"}], "user": "me", "max_tokens": 3, "n": 1,
        "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}, "seed": 0,
    }  # fmt: skip
    request = read_request("chat", body, Sampling())
    assert request.overridden == ("ignore_eos", "chat_template_kwargs")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"parallel_tool_calls": False}, ("parallel_tool_calls",)),
        ({"parallel_tool_calls": True, "response_format": {"type": "text"}}, ()),
        ({"response_format": {"type": "json_object"}}, ("response_format",)),
    ],
)
def test_what_asks_for_nothing_is_not_named(asked: dict[str, object], named: tuple[str, ...]):
    body = {"messages": [{"role": "user", "content": "a"}], **asked}
    assert read_request("chat", body, Sampling()).overridden == named


def test_what_a_client_asks_against_the_runs_sampling_is_overridden_and_recorded(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        chat(client, "hello", temperature=0.0, top_p=1.0, max_tokens=3)
        (turn,) = rollout.agents.open["0.0"].running.turns
        assert turn.overridden == ("temperature",)
        assert turn.end - turn.generated <= 3
        with pytest.raises(openai.BadRequestError, match="n = 2"):
            chat(client, "hello", n=2)


def test_limits_are_checked_before_a_turn(bus: Bus):
    from rollstream.producers.agent_settings import AgentSettings

    with agent_rollout(bus, settings=AgentSettings(service=True, turns_max=1)) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        chat(client, "hello")
        with pytest.raises(openai.BadRequestError, match="turns_max of 1"):
            chat(client, "another")
        assert chat(client, "hello")  # a stored answer is no new turn
