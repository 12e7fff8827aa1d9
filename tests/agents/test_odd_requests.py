"""Requests, states and texts that are wrong in themselves end their request, turn or episode, with
the reason; rollout and other episodes go on.
"""

import json
import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import httpx2
import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.producers.agents.chat_format import PlainChat
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.dialogue.tool_formats import TOOL_FORMATS
from rollstream.producers.settings import TaskSettings
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.bus import Bus
from rollstream.streams.records import Partial, Record
from rollstream.streams.values import Branch, Turn
from rollstream.streams.writer import publish
from testbed.agents.process import records
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment, resumed
from testbed.waiting import wait_for

HALF = "\ud83d"  # one half of an emoji
CLIENT = httpx2.Client(timeout=60, trust_env=False)  # one: each reads the machine's certificates
LETTERS: Any = TextTokenizer(None)
ADD = {"type": "function", "function": {"name": "add"}}


def send(
    rollout: AgentRollout, method: str, path: str, body: Any, key: str = "", **headers: str
) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key or rollout.key()}"} | headers
    return CLIENT.request(method, rollout.url + path, content=data, headers=headers)


def chat(rollout: AgentRollout, *contents: Any, **more: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": content} for content in contents]
    body = {"messages": messages, "max_tokens": 2} | more
    return send(rollout, "POST", "/v1/chat/completions", body)


def is_explained(answer: httpx2.Response) -> bool:
    """A refusal of the client's, with a sentence that can be sent."""
    message = answer.json()["error"]["message"]
    return 400 <= answer.status_code < 500 and len(message) > 10


def deep(levels: int) -> bytes:
    return b'{"messages": ' + b"[" * levels + b"]" * levels + b"}"


MESSAGE = {"role": "user", "content": "hello"}
ASKED = {"messages": [MESSAGE], "max_tokens": 2}
CALLED = {"role": "assistant", "content": ""}
ODD_BODIES: dict[str, Any] = {
    "no JSON": b"{",
    "not UTF-8": b'{"messages": "\xff"}',
    "a list": [],
    "deep": deep(100_000),
    "nested above the bound": deep(500),
    "NaN": b'{"messages": [], "temperature": NaN}',
    "too large a float": b'{"messages": [{"role": "user", "content": "a"}], "top_p": 1e999}',
    "digits": b'{"messages": [{"role": "user", "content": "a"}], "x": ' + b"9" * 400 + b"}",
    "too many digits": b'{"max_tokens": ' + b"9" * 5000 + b"}",
    "tools with text": {"messages": [MESSAGE], "tools": [{"function": "x"}]},
    "tools without a function": {"messages": [MESSAGE], "tools": [{"type": "function"}]},
    "a tool without a name": {"messages": [MESSAGE], "tools": [{"function": {"name": 5}}]},
    "a schema that is a list": {
        "messages": [MESSAGE],
        "tools": [{"function": {"name": "f", "parameters": [1]}}],
    },
    "tools that are text": {"messages": [MESSAGE], "tools": "add"},
    "tools of lists": {"messages": [MESSAGE], "tools": [[]]},
    "no role": {"messages": [{"content": "hello"}]},
    "a role that is a number": {"messages": [{"role": 5, "content": "hello"}]},
    "content that is a number": {"messages": [{"role": "user", "content": 5}]},
    "a part without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "calls that are text": {"messages": [MESSAGE, {**CALLED, "tool_calls": "x"}]},
    "calls of text": {"messages": [MESSAGE, {**CALLED, "tool_calls": ["x"]}]},
    "a call of text": {"messages": [MESSAGE, {**CALLED, "tool_calls": [{"function": "x"}]}]},
    "arguments of a list": {
        "messages": [
            MESSAGE,
            {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        ]
    },
    "a result's id that is an object": {
        "messages": [MESSAGE, {"role": "tool", "tool_call_id": {}, "content": "5"}]
    },
    "a role that the template does not know": {"messages": [{"role": HALF, "content": "a"}]},
}


@pytest.fixture(scope="module")
def odd_rollout(tmp_path_factory: pytest.TempPathFactory):
    from rollstream.streams.connect import open_bus
    from rollstream.streams.topics import catalogue

    bus = open_bus(f"sqlite:{tmp_path_factory.mktemp('odd') / 'bus'}")
    bus.create(catalogue(1))
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        yield rollout


@pytest.mark.parametrize("what", ODD_BODIES)
def test_an_odd_request_gets_a_4xx_with_a_sentence(odd_rollout: AgentRollout, what: str):
    refused = odd_rollout.agents.counts.refused.total()
    answer = send(odd_rollout, "POST", "/v1/chat/completions", ODD_BODIES[what])
    if what == "a role that the template does not know":  # the built-in one knows all
        assert answer.status_code in (200, 400)
        return
    assert is_explained(answer), answer.text
    assert odd_rollout.agents.counts.refused.total() == refused + 1
    assert chat(odd_rollout, "hello").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"reward": 10**400}, {"reward": 1e300}, {"reward": "1"},
        {"reward": 1.0, "scores": {"a": 1e300}},
        {"reward": 1.0, "scores": {"a" * 5000: 1}}, {"reward": 1.0, "scores": [1]},
        {"reward": 1.0, "scores": {str(n): 1 for n in range(1000)}},
        {"reward": 1.0, "scores": {"": 1}}, {"reward": 1.0, "scores": {"a\x1b[31m": 1}},
        b'{"reward": NaN}', b'{"reward": 1, "scores": {"a": Infinity}}',
    ],
)  # fmt: skip
def test_an_odd_reward_is_refused(odd_rollout: AgentRollout, body: Any):
    assert is_explained(send(odd_rollout, "POST", "/sessions/0.0/reward", body))


@pytest.mark.parametrize(
    "body",
    [
        {"reward": 1, "failed": "x"},
        {"failed": 5},
        {"failed": False},
        {"scores": {"a": 1}},
        {"faild": "the site was down"},
        {"reward": 1, "score": {"a": 1}},
    ],
)
def test_an_odd_end_is_refused_and_ends_nothing(odd_rollout: AgentRollout, body: Any):
    answer = send(odd_rollout, "DELETE", "/sessions/0.0", body)
    assert (answer.status_code, is_explained(answer)) == (400, True)
    assert chat(odd_rollout, "hello").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": [97, 99999]}, "token 99999"),
        ("/v1/completions", {"prompt": [97, -1]}, "prompt[1] = -1"),
        ("/inference/v1/generate", {"token_ids": [99999]}, "token 99999"),
        ("/inference/v1/generate", {}, "token_ids is missing"),
        ("/inference/v1/generate", {"token_ids": "hello"}, "not a list of token ids"),
    ],
)
def test_token_ids_that_no_model_has_are_the_requests_own_fault(
    bus: Bus, path: str, body: Any, names: str
):
    with agent_rollout(bus, task=TaskSettings(retries=1)) as rollout:
        rollout.assign(assignment())
        assert chat(rollout, "hello").status_code == 200
        error = send(rollout, "POST", path, body).json()["error"]
        assert (error["code"], names in error["message"]) == ("invalid_request", True), error
        assert send(rollout, "DELETE", "/sessions/0.0", {"failed": "odd ids"}).status_code == 204
        assert rollout.agents.counts.retried == 1  # no limit of the run was reached


def test_the_newest_reward_before_the_end_counts_with_its_scores(bus: Bus):
    with agent_rollout(bus) as rollout:
        for index, end in enumerate(({}, {"reward": 3.0}, {"reward": 3.0, "scores": {"c": 3}})):
            rollout.assign(assignment(f"0.{index}"))
            key, place = rollout.key(f"0.{index}"), f"/sessions/0.{index}"
            body = {"messages": [MESSAGE], "max_tokens": 2}
            assert send(rollout, "POST", "/v1/chat/completions", body, key).status_code == 200
            for reward in ({"reward": 1, "scores": {"a": 1}}, {"reward": 2, "scores": {"b": 2}}):
                assert send(rollout, "POST", f"{place}/reward", reward, key).status_code == 204
            assert send(rollout, "DELETE", place, end, key).status_code == 204
        wait_for(lambda: len(records(bus, "trajectories")) == 3)
        found = [(r.reward, r.scores) for r in records(bus, "trajectories")]
    assert found == [(2.0, {"b": 2.0}), (3.0, {}), (3.0, {"c": 3.0})]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/embeddings"), ("GET", "/sessions")])
def test_a_path_or_method_without_a_route_is_refused_as_json(
    odd_rollout: AgentRollout, method: str, path: str
):
    answer = send(odd_rollout, method, path, {})
    assert answer.status_code in (404, 405)
    assert path in answer.json()["error"]["message"]


def test_half_an_emoji_in_a_request_becomes_a_replacement_character(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        assert chat(rollout, f"cut {HALF}", HALF[::-1]).status_code == 200
        assert chat(rollout, "whole \ud83d\ude00").status_code == 200
        said = send(rollout, "POST", "/v1/completions", {"prompt": f"x{HALF}"})
        assert said.status_code == 200
        body = {"reward": 0.5, "scores": {f"style{HALF}": 1.0}}
        assert send(rollout, "POST", "/sessions/0.0/reward", body).status_code == 204
        assert send(rollout, "DELETE", "/sessions/0.0", {}).status_code == 204
        (record,) = rollout.finished()
    assert record.scores == {"style\ufffd": 1.0}
    wait_for(lambda: records(bus, "trajectories"))


FAILURES = [f"tool said {HALF}", {"a": HALF}, [HALF] * 1000, 5, {HALF: {HALF: HALF}}]


TEXTS = [failure for failure in FAILURES if isinstance(failure, str)]


def test_a_failure_that_is_no_text_is_refused(odd_rollout: AgentRollout):
    for failure in FAILURES:
        if not isinstance(failure, str):
            answer = send(odd_rollout, "DELETE", "/sessions/0.0", {"failed": failure})
            assert (answer.status_code, is_explained(answer)) == (400, True)


@pytest.mark.parametrize("failure", TEXTS, ids=range(len(TEXTS)))
def test_any_reason_of_a_failure_ends_the_episode_and_can_be_repeated(bus: Bus, failure: Any):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        key = rollout.key()
        assert send(rollout, "DELETE", "/sessions/0.0", {"failed": failure}).status_code == 204
        (record,) = rollout.finished()
        wait_for(lambda: rollout.failures or records(bus, "trajectories"))
        assert send(rollout, "DELETE", "/sessions/0.0", {"failed": failure}, key).status_code == 204
        rollout.assign(assignment("1.0"))
        assert send(rollout, "DELETE", "/sessions/1.0", {}, rollout.key("1.0")).status_code == 204
        wait_for(lambda: rollout.failures or len(records(bus, "trajectories")) == 2)
    assert record.finish == "dead"
    assert record.reason.startswith("agent: failed: ")
    record.reason.encode()


# ---- states in the log ---------------------------------------------------------------------------


def durable(bus: Bus, environment: str, **changed: Any) -> Partial:
    """Append a partial with this state, as the newest of the episode."""
    record = Partial(
        "0.0", 0, 1, "rollout-0", 1, None, 0, np.empty(0, np.uint32), np.empty(0, np.uint8),
        np.empty(0, np.float32), (), environment=environment,
    )  # fmt: skip
    record = replace(record, **changed)
    publish(bus, "partials", record.trajectory, record)
    return record


def test_a_run_that_half_an_emoji_ended_goes_on(bus: Bus):
    """An earlier release has written the state, whose text its own codec refused."""
    durable(bus, json.dumps({"reward": None, "scores": {}, "ended": f"failed: {HALF}"}))
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        (record,) = rollout.finished()
        wait_for(lambda: rollout.failures or records(bus, "trajectories"))
    assert (record.finish, record.reason) == ("dead", "agent: failed: \ufffd")


STATES = [
    "not json", "[]", "5", "null", '"text"', "{", '{"reward": "x"}', '{"scores": null}',
    '{"scores": {"a": "b"}}', '{"ended": 5}', '{"abandoned": ["x"]}', '{"abandoned": [7]}',
    '{"abandoned": [-1]}', '{"reward": 1e999}', '{"reward": NaN}', '{"reward": 1e300}',
    "[" * 100_000, '{"a":' * 5000, '{"reward": ' + "9" * 5000 + "}", '{"ended": ["x"]}', "\x00",
    '{"scores": {"a": 1e200}}', '{"reward": true}', '{"reward": [1]}',
]  # fmt: skip


def test_a_state_that_is_none_lets_the_episode_start_from_its_prompt(bus: Bus):
    for number, state in enumerate(STATES):
        durable(bus, state, trajectory=f"{number}.0", group=number)
    with agent_rollout(bus, term=2) as rollout:
        for number, state in enumerate(STATES):
            name = f"{number}.0"
            rollout.assign(resumed(bus, assignment(name), rollout_term=2))
            assert rollout.in_progress.broken_chains == number + 1, state[:40]
            key = rollout.key(name)
            assert send(rollout, "POST", "/v1/chat/completions", ASKED, key).status_code == 200
            ended = send(rollout, "DELETE", f"/sessions/{name}", {"reward": 1.0}, key)
            assert ended.status_code == 204
        wait_for(lambda: rollout.failures or len(rollout.done) == len(STATES))
    for record in rollout.done:
        assert (record.reward, len(record.turns)) == (1.0, 1)
        assert refusal(record, TrainingBounds()) is None


ODD_TURNS: dict[str, Callable[[Turn], Turn]] = {
    "an answer that is no JSON": lambda turn: replace(turn, answer="x"),
    "an answer without fields": lambda turn: replace(turn, answer="{}"),
    "calls of text": lambda turn: replace(
        turn, answer='{"content": "", "reasoning": "", "tool_calls": ["x"]}'
    ),
    "an end beyond": lambda turn: replace(turn, end=1 << 70),
    "negative": lambda turn: replace(turn, start=-5),
    "nothing generated": lambda turn: replace(turn, generated=turn.end),
    "all generated": lambda turn: replace(turn, generated=turn.start),
}


QUICK_TURNS = ("calls of text", "an end beyond", "a branch forwards")


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=() if what in QUICK_TURNS else pytest.mark.slow)
        for what in (*ODD_TURNS, "a branch forwards", "a branch at nothing")
    ],
)
def test_turns_that_are_none_let_the_episode_start_from_its_prompt(bus: Bus, what: str):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        assert chat(rollout, "hello").status_code == 200
        rollout.kill()
    (good,) = (one for one in records(bus, "partials") if isinstance(one, Partial))
    if what in ODD_TURNS:
        odd: Record = replace(good, turns=(ODD_TURNS[what](good.turns[0]),))
    else:
        odd = replace(good, branches=(Branch(3, 9 if "forwards" in what else -7),))
    publish(bus, "partials", "0.0", odd)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, assignment(), rollout_term=2))
        assert rollout.in_progress.broken_chains == 1
        assert chat(rollout, "hello").status_code == 200


# ---- texts of the model --------------------------------------------------------------------------

ODD_TEXTS = [
    "[a" + ".a" * 400 + "(x=1)]", "[a" + ".a" * 50_000 + "(x=1)]", "[f(x=" + "-" * 5000 + "1)]",
    "[f(x=1" + "+1" * 20_000 + ")]", "[f(x=" + "not " * 5000 + "1)]", "[f(" + "[" * 5000 + ")]",
    "[f(x=9" + "9" * 5000 + ")]", "[f(x='\ud83d')]", "[f(**x)]", "[f(x=b'a')]", "[f(x={[]: 1})]",
    "[f(x=1e999)]", "[f(x={1,2})]", "[f()(x=1)]", "[f[0](x=1)]", "[" + "f(x=1)," * 500 + "]",
    "[f(x=lambda: 1)]", "[f(x=" + "{1:" * 60 + "1" + "}" * 60 + ")]", "[f(x=1, x=2)]",
    '{"name": "f", "arguments": {"a": "\\ud83d"}}', '{"name": "f"}' * 500, '{"name": "\ud83d"}',
    '{"name": "f", "arguments": ' + "[" * 5000, '{"name": "f", "arguments": "{"}', "{" * 100_000,
    '{"name": {"a": 1}, "arguments": 5}', '{"name": "f", "arguments": "' + "9" * 5000 + '"}',
    '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": 1e999}}',
    '<tool_call>{"name": "f"}' * 500, "<tool_call>" * 5000, "[TOOL_CALLS]" * 5000,
    "[TOOL_CALLS]f[ARGS]" + "{" * 5000, "<|python_tag|>" * 5000 + "{", "</think>" * 5000, "\ud83d",
    '[TOOL_CALLS][{"name": "f", "arguments": "\ud83d"}]', "", "\x00" * 100,
]  # fmt: skip


class SpokenChat(PlainChat):
    """The chat of a model that writes `text` whatever it is asked: what it generates is decoded to
    that.
    """

    def __init__(self, text: str, tool_format: str) -> None:
        super().__init__(LETTERS, tool_format)
        self.text = text

    def decode(self, tokens) -> str:  # type: ignore[no-untyped-def]
        return self.text


QUICK_TEXTS = list(zip(ODD_TEXTS, cycle(TOOL_FORMATS), strict=False))
ALL_TEXTS = [(text, tool_format) for tool_format in TOOL_FORMATS for text in ODD_TEXTS]


@pytest.mark.parametrize(
    "texts", [QUICK_TEXTS, pytest.param(ALL_TEXTS, marks=pytest.mark.slow)], ids=len
)
def test_no_text_of_a_model_ends_the_loop(bus: Bus, texts: list[tuple[str, str]]):
    spoken = SpokenChat("", "hermes")
    with agent_rollout(bus, chat=spoken) as rollout:
        for number, (text, spoken._tool_format) in enumerate(texts):
            spoken.text = text
            rollout.assign(assignment(f"{number}.0"))
            key, body = rollout.key(f"{number}.0"), {**ASKED, "tools": [ADD]}
            answer = send(rollout, "POST", "/v1/chat/completions", body, key)
            assert answer.status_code == 200, (text[:40], answer.text[:200])
            path = f"/sessions/{number}.0"
            assert send(rollout, "DELETE", path, {"reward": 1.0}, key).status_code == 204
        wait_for(lambda: rollout.failures or len(rollout.done) == len(texts))
        wait_for(lambda: rollout.failures or len(records(bus, "trajectories")) == len(texts))
    assert {one.finish for one in rollout.done} <= {"stop", "length"}


class BrokenChat(PlainChat):
    """A chat whose parser fails at every answer."""

    def parse(self, tokens, tools, call_prefix):  # type: ignore[no-untyped-def]
        raise RecursionError("maximum recursion depth exceeded")


def test_an_answer_that_breaks_its_parser_ends_that_turn_alone(bus: Bus):
    broken = BrokenChat(LETTERS)
    with agent_rollout(bus, chat=broken) as rollout:
        for trajectory in ("0.0", "1.0"):
            rollout.assign(assignment(trajectory))
            answer = send(
                rollout, "POST", "/v1/chat/completions", {"messages": [MESSAGE]},
                rollout.key(trajectory),
            )  # fmt: skip
            assert answer.status_code == 422
            assert "RecursionError" in answer.json()["error"]["message"]
        assert rollout.agents.counts.broken == 2
        rollout.chat = PlainChat(LETTERS)
        rollout.agents.open["0.0"].conversation.chat = rollout.chat
        assert chat(rollout, "hello").status_code == 200
        assert send(rollout, "DELETE", "/sessions/0.0", {"reward": 1.0}).status_code == 204
        (record,) = rollout.finished()
    assert len(record.turns) == 1
    assert refusal(record, TrainingBounds()) is None


def test_a_partial_that_does_not_encode_ends_its_episode_dead(bus: Bus):
    with agent_rollout(bus) as rollout:
        rollout.assign(assignment())
        rollout.assign(assignment("1.0"))
        set_by = threading.Event()

        def spoil() -> None:
            rollout.agents.open["0.0"].running.failures = (HALF,)
            set_by.set()

        rollout.in_loop(spoil)
        assert set_by.wait(60)
        assert chat(rollout, "hello").status_code == 422
        (record,) = rollout.finished()
        assert (record.trajectory, record.finish) == ("0.0", "dead")
        wait_for(lambda: rollout.failures or records(bus, "trajectories"))
        body = {"messages": [MESSAGE]}
        other = send(rollout, "POST", "/v1/chat/completions", body, rollout.key("1.0"))
        assert other.status_code == 200
