"""The routes beside chat completions: tools, responses, completions, token ids, and the session in
the path.
"""

import httpx2
from openai import OpenAI

from rollstream.producers.agents.chat_format import ChatFormat
from rollstream.producers.tasks.tool_calls import ParsedAnswer, parse_tool_calls
from rollstream.streams.bus import Bus
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment, letters_format

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


class CallingChat:
    """A chat whose model calls a tool, whatever letters it writes: `said` stands for its texts."""

    def __init__(self, said: str = CALL) -> None:
        self._chat: ChatFormat = letters_format()
        self.said = said

    def __getattr__(self, name: str):
        return getattr(self._chat, name)

    def parse(self, tokens, tools, call_prefix: str):
        if not tools:
            return ParsedAnswer(self.said)
        return parse_tool_calls(self.said, "hermes", tools, lambda at: f"{call_prefix}{at}")


def client_of(rollout: AgentRollout) -> OpenAI:
    return OpenAI(base_url=f"{rollout.url}/v1", api_key=rollout.key(), max_retries=0, timeout=60)


def test_a_tool_call_and_its_result_continue_the_same_tokens(bus: Bus):
    with agent_rollout(bus, chat=CallingChat()) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        messages: list = [{"role": "user", "content": "1+1?"}]
        first = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore
        (call,) = first.choices[0].message.tool_calls or []
        assert (first.choices[0].finish_reason, call.function.name) == ("tool_calls", "add")  # type: ignore
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore
        running = rollout.agents.open["0.0"].running
        assert not running.branches
        assert [turn.fork for turn in running.turns] == ["", ""]


def test_responses_with_tools_continue_the_same_tokens(bus: Bus):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    with agent_rollout(bus, chat=CallingChat()) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        items: list = [{"role": "user", "content": "1+1?"}]
        first = client.responses.create(model="m", input=items, tools=[tool])  # type: ignore
        (call,) = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        events = list(client.responses.create(model="m", input=items, tools=[tool], stream=True))  # type: ignore
        assert events[-1].type == "response.completed"
        running = rollout.agents.open["0.0"].running
        assert len(running.turns) == 2
        assert not running.branches


def test_completions_of_token_ids_continue_and_texts_that_tokenize_otherwise_fork(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        client = client_of(rollout)
        ids = {"return_token_ids": True}
        first = client.completions.create(model="m", prompt="ab", max_tokens=40, extra_body=ids)
        (choice,) = first.choices
        held = [*first.prompt_token_ids, *choice.token_ids]  # type: ignore
        client.completions.create(model="m", prompt=[*held, 97, 98], max_tokens=40)
        client.completions.create(model="m", prompt="abX", max_tokens=40)
        turns = rollout.agents.open["0.0"].running.turns
        assert [turn.fork for turn in turns] == ["", "", "retokenised"]


def test_the_token_route_gives_the_sampled_ids_and_log_probabilities(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        body = {
            "token_ids": [256, 97],
            "sampling_params": {"max_tokens": 50, "temperature": 1.0, "logprobs": 0},
        }
        headers = {"authorization": f"Bearer {rollout.key()}"}
        url = f"{rollout.url}/inference/v1/generate"
        found = httpx2.post(url, json=body, headers=headers, timeout=60).json()
        (choice,) = found["choices"]
        running = rollout.agents.open["0.0"].running
        assert choice["token_ids"] == running.content()[0][2:].tolist()
        rows = choice["logprobs"]["content"]
        assert [row["token"] for row in rows] == [f"token_id:{t}" for t in choice["token_ids"]]
        assert all(row["logprob"] <= 0 for row in rows)


def test_the_key_in_the_path_names_the_session_too(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        url = f"{rollout.url}/sessions/{rollout.key()}"
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        messages: list = [{"role": "user", "content": "hello"}]
        assert client.chat.completions.create(model="m", messages=messages)
        assert httpx2.delete(url, timeout=60).status_code == 204
        (record,) = rollout.finished()
        assert len(record.turns) == 1


def test_a_service_opens_the_episode_that_waits_and_no_other(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        opened = httpx2.post(f"{rollout.url}/sessions", timeout=60).json()
        assert opened["id"] == "0.0"
        assert opened["key"] == rollout.key()
        assert opened["task"] == {"prompt": "say a", "reference": {"answer": "a"}}
        assert httpx2.post(f"{rollout.url}/sessions", timeout=60).status_code == 204


def test_bodies_that_are_no_requests_are_refused(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        url = f"{rollout.url}/v1/chat/completions"
        headers = {"authorization": f"Bearer {rollout.key()}"}
        for content in (b"", b"[1]", b"{", b'{"messages": 3}', b'{"messages": [{"role": 5}]}'):
            found = httpx2.post(url, content=content, headers=headers, timeout=60)
            assert found.status_code == 400, (content, found.text)
        big = b'{"messages": "' + b"x" * (9 << 20) + b'"}'
        assert httpx2.post(url, content=big, headers=headers, timeout=60).status_code == 413
        assert not rollout.agents.open["0.0"].running.turns


def test_true_and_false_are_rewards_of_a_session(bus: Bus):
    """As JSON of `answer === expected`."""
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        client_of(rollout).completions.create(model="m", prompt="a")
        body = {"reward": True, "scores": {"long": False}}
        headers = {"authorization": f"Bearer {rollout.key()}"}
        url = f"{rollout.url}/sessions/0.0"
        assert httpx2.request("DELETE", url, json=body, headers=headers).status_code == 204
        (record,) = rollout.finished()
    assert (record.reward, record.scores) == (1.0, {"long": 0.0})
