"""Texts of agents, models and browsers: requests of the agents' endpoint, keys, tool calls in every
format, messages for a chat template, and parameters of the explorer: a value or a typed error.
"""

import json

from hypothesis import example, given, strategies as st

from rollstream.look.explorer.filters import limited, row_filter
from rollstream.producers.agents.keys import SessionIdentity, SessionKeys
from rollstream.producers.agents.requests import read_request, reward_in
from rollstream.producers.dialogue.tool_formats import TOOL_FORMATS
from rollstream.producers.tasks.tool_calls import parse_tool_calls
from rollstream.streams.values import Sampling
from tests.edges.fuzz.damage import ODD, TAILS, changed_bytes, changed_json, checked, examples
from tests.tools.test_tool_calls import WRITTEN

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES = {
    "chat": {
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "3"}], "tools": [TOOL], "max_tokens": 5,
        "temperature": 1.0, "stream": True, "stream_options": {"include_usage": True}, "n": 1,
    },
    "completion": {"model": "m", "prompt": "x", "max_tokens": 5, "logprobs": 1},
    "response": {
        "model": "m", "instructions": "i", "input": [{"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"}],
        "tools": [{"type": "function", "name": "add"}], "max_output_tokens": 4,
    },
    "tokens": {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
}  # fmt: skip
SAMPLING = Sampling()


@given(st.sampled_from(list(BODIES)), st.data())
@examples(200)
def test_a_request_of_any_shape_is_read_or_refused(route: str, data: st.DataObject) -> None:
    body = changed_json(data.draw, BODIES[route])
    if isinstance(body, dict):
        request = checked(lambda: read_request(route, body, SAMPLING, "key"))  # pyright: ignore[reportArgumentType, reportUnknownArgumentType, reportUnknownLambdaType]
        checked(lambda: reward_in(body))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
        assert request is None or request.route == route


@given(st.data())
@examples(60)
def test_any_key_names_its_session_or_none(data: st.DataObject) -> None:
    keys = SessionKeys(bytes(32))
    key = keys.issue(SessionIdentity("g7.0", 1, "r0", 2))
    other = changed_bytes(data.draw, key.encode()).decode("latin-1")
    named = SessionKeys(bytes(32)).identity(other)
    assert named is None or other == key


TEXTS = st.sampled_from(
    ["[", "]", "(", ")", "{", "}", '"', "'", "<tool_call>", "</tool_call>", "<|python_tag|>",
     "[TOOL_CALLS]", "[ARGS]", "</think>", "a.a", "=", ",", ";", "\\", "\ud83d", "\x00", "1e999",
     "9" * 5000, "-", "lambda: 0", "f'{x}'", "None", '{"name": "add"}', "é", " ", "\n", "a"]
)  # fmt: skip


@given(st.sampled_from(list(TOOL_FORMATS)), st.data())
@examples(300)
def test_any_answer_is_content_and_calls_that_can_be_written(
    name: str, data: st.DataObject
) -> None:
    text = data.draw(st.sampled_from([*WRITTEN.values(), ""]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        piece = data.draw(TEXTS) * data.draw(st.sampled_from([1, 1, 2, 400]))
        text = text[:at] + piece + text[at + data.draw(st.integers(0, 4)) :]
    parsed = parse_tool_calls(text, name)
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        f"{call.name}{call.arguments}".encode()


PARAMETERS = st.dictionaries(
    st.sampled_from(["limit", "reward_min", "lag_max", "group", "name", "ended", "wave"]),
    st.sampled_from(["", "1", "-1", "nan", "inf", "1e999", "9" * 5000, "open", "\u0661", "1_0"])
    | st.text(max_size=10),
)


@given(PARAMETERS)
@example({"limit": "9" * 5000})
@examples(80)
def test_parameters_of_the_page_are_a_filter_or_refused(given: dict[str, str]) -> None:
    checked(lambda: row_filter(given))
    checked(lambda: limited(given, 100, 10))


@given(ODD, st.sampled_from(TAILS))
@examples(60)
def test_a_reward_is_a_number_or_refused(value: object, tail: bytes) -> None:
    reward = checked(lambda: reward_in({"reward": value}))
    assert reward is None or isinstance(reward, float)
    checked(lambda: reward_in({"reward": tail.decode("latin-1")}))
