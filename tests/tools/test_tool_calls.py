"""Tool calls are found in the formats that vLLM parses, and hostile text is only text."""

import json

import pytest
from hypothesis import given, strategies as st

from rollstream.producers.tasks.tool_calls import (
    CALLS_MAX,
    TOOL_FORMATS,
    ToolCall,
    likely_format,
    parse_tool_calls,
)

ADD = ToolCall("add", '{"a": 1, "b": "x"}', "call_0")
SUB = ToolCall("calc.sub", "{}", "call_1")
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
    '<tool_call>{"name": "calc.sub", "arguments": {}}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}; '
    '{"name": "calc.sub", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "calc.sub", "arguments": {}}]',
    "pythonic": "[add(a=1, b='x'), calc.sub()]",
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_every_format_are_found(name: str):
    parsed = parse_tool_calls(WRITTEN[name], name)
    assert parsed.tool_calls == (ADD, SUB)
    assert (parsed.content, parsed.malformed) == ("", ())


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_without_calls_is_content_as_it_was(name: str):
    text = "  The tool [x] gives {1, 2}.\n"
    assert parse_tool_calls(text, name).content == text
    assert parse_tool_calls(text, name).tool_calls == ()


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]add{"a": 1, "b": "x"}[TOOL_CALLS]calc.sub{}',
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]calc.sub[ARGS]{}',
    ],
)
def test_newer_calls_of_mistral_are_found(text: str):
    assert parse_tool_calls(text, "mistral").tool_calls == (ADD, SUB)


def test_text_around_the_calls_and_thoughts_before_them_stay():
    text = 'I think</think>\nFirst. <tool_call>{"name": "f"}</tool_call> Then.'
    parsed = parse_tool_calls(text)
    assert (parsed.reasoning, parsed.content) == ("I think", "First.  Then.")
    assert parsed.tool_calls == (ToolCall("f", "{}", "call_0"),)


def test_the_last_call_may_lack_its_end():
    assert parse_tool_calls('<tool_call>{"name": "f"}').tool_calls[0].name == "f"


def test_a_malformed_call_stays_in_the_content_beside_a_good_one():
    text = '<tool_call>{"name": </tool_call><tool_call>{"name": "f"}</tool_call>'
    parsed = parse_tool_calls(text)
    assert parsed.content == '<tool_call>{"name": </tool_call>'
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.malformed[0].startswith("not JSON")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "rm -rf /", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1' + "0" * 5000 + "}}</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": ' + '{"a":' * 5000),
        ("mistral", "[TOOL_CALLS]f"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("pythonic", "[f(__import__('os').system('true'))]"),
        ("pythonic", "[f(x=__import__('os').system('true'))]"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(x={1: 2, (3,): 4})]"),
        ("pythonic", "[f(x=" + "(" * 5000 + ")]"),
        ("pythonic", "[f(x=\0)]"),
    ],
)
def test_what_is_no_call_is_named_and_stays_text(name: str, text: str):
    parsed = parse_tool_calls(text, name)
    assert (parsed.tool_calls, parsed.content) == ((), text)
    assert len(parsed.malformed) == 1


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_without_a_sign_of_a_call_only_known_tools_are_called(name: str):
    tools = [{"type": "function", "function": {"name": "other"}}]
    parsed = parse_tool_calls(WRITTEN[name], name, tools)
    assert (parsed.tool_calls, parsed.content) == ((), WRITTEN[name])
    known = [{"type": "function", "function": {"name": one}} for one in ("add", "calc.sub")]
    assert parse_tool_calls(WRITTEN[name], name, known).tool_calls == (ADD, SUB)


def test_the_number_of_calls_is_bounded():
    text = '<tool_call>{"name": "f"}</tool_call>' * (CALLS_MAX + 5)
    assert len(parse_tool_calls(text).tool_calls) == CALLS_MAX


def test_half_a_surrogate_pair_is_escaped():
    call = parse_tool_calls('<tool_call>{"name":"f","arguments":{"x":"\\ud800"}}</tool_call>')
    assert call.tool_calls[0].arguments.encode() == b'{"x": "\\ud800"}'


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</think>", '{"name": "f"',
     ', "arguments": ', "{}", "}", "[", "]", "f(", "x=", "1", ")", ",", ";", "\\", '"', "[ARGS]"]
)  # fmt: skip


TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=24).map("".join)


@given(TEXTS, st.sampled_from([*WRITTEN]))
def test_every_text_has_a_result_that_can_be_sent(text: str, name: str):
    parsed = parse_tool_calls(text, name)
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        call.name.encode()
    if not parsed.tool_calls and not parsed.reasoning and "</think>" not in text:
        assert parsed.content == text


ARGUMENTS = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=3,
)


@given(ARGUMENTS, st.sampled_from(["hermes", "llama3_json", "mistral"]))
def test_any_arguments_come_back(arguments: dict[str, object], name: str):
    call = json.dumps({"name": "f", "arguments": arguments})
    text = {"hermes": f"<tool_call>{call}</tool_call>", "mistral": f"[TOOL_CALLS][{call}]"}
    if "</tool_call>" in call or "</think>" in call or call.count("[") + call.count("{") > 60:
        return
    parsed = parse_tool_calls(text.get(name, call), name)
    assert json.loads(parsed.tool_calls[0].arguments) == arguments


def test_the_format_is_known_from_a_template():
    assert likely_format("… <tool_call> …") == "hermes"
    assert likely_format("[TOOL_CALLS]") == "mistral"
    assert likely_format("{{ '<|python_tag|>' }}") == "llama3_json"
    assert likely_format("no tools") == "hermes"
