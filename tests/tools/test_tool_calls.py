"""Tool calls are found in the formats that vLLM parses, and hostile text is only text."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from rollstream.producers.dialogue import tool_formats, tool_parts
from rollstream.producers.dialogue.tool_formats import TOOL_FORMATS, UNKNOWN, format_of_template
from rollstream.producers.dialogue.tool_parts import CALLS_MAX
from rollstream.producers.tasks.tool_calls import ToolCall, parse_tool_calls

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
    "openai": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": "x"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.calc.sub <|constrain|>json<|message|>{}",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=calc.sub>\n</function>\n</tool_call>",
    "glm45": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b"
    "</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n<tool_call>calc.sub\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>calc.sub<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>"
    '{"a": 1, "b": "x"}<|tool_call_end|><|tool_call_begin|>calc.sub<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">x</parameter>\n</invoke>\n<invoke name="calc.sub">\n</invoke>\n'
    "</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>x"
    "</parameter>\n</function>\n</seed:tool_call><seed:tool_call><function=calc.sub></function>"
    "</seed:tool_call>",
    "atem": '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1'
    '</atem:parameter>\n<atem:parameter name="b">x</atem:parameter>\n</atem:invoke>\n'
    '<atem:invoke name="calc.sub">\n</atem:invoke>\n</atem:function_calls>',
    "gemma4": '<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|><|tool_call>call:calc.sub{}'
    "<tool_call|>",
    "lfm2": "<|tool_call_start|>[add(a=1, b='x'), calc.sub()]<|tool_call_end|>",
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "calc.sub", "arguments": {}}]',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "calc.sub", "arguments": {}}]',
    "nemotron_json": '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "calc.sub", "arguments": {}}]</TOOLCALL>',
    "hunyuan_a13b": '<tool_calls>[{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "calc.sub", "arguments": {}}]</tool_calls>',
    "cohere": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1, "b": "x"}}, '
    '{"tool_name": "calc.sub", "parameters": {}}]<|END_ACTION|>',
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
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<function=f>", "<parameter=x>", "<arg_key>",
     "</parameter>", "<|message|>", "to=functions.f", "<|tool_call>call:f", "<tool_call|>",
     "<|python_tag|>", "</think>", '{"name": "f"',
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


def json_calls(count: int) -> str:
    return ";".join(['{"name": "f", "parameters": {"x": "' + "a" * 2000 + '"}}'] * count)


LONG: dict[str, Callable[[int], tuple[str, str]]] = {
    "calls": lambda n: ("llama3_json", json_calls(n)),
    "calls that nothing closes": lambda n: ("hermes", "<tool_call>" * n),
    "malformed calls": lambda n: ("hermes", "<tool_call>{</tool_call>" * n),
    "signs": lambda n: ("mistral", "[TOOL_CALLS]" * n),
    "brackets": lambda n: ("llama3_json", "{" * n * 100),
    "gaps": lambda n: ("llama3_json", '{"name": "f"}' + " " * n * 1000 + ";" + "\n" * n * 1000),
    "dots": lambda n: ("pythonic", "[a" + ".a" * n * 10 + "(x=1)]"),
    "arguments": lambda n: ("pythonic", "[f(" + ",".join(f"x{i}=1" for i in range(n * 5)) + ")]"),
    "tags": lambda n: ("qwen3_coder", "<tool_call><function=f>" + "<parameter=x>1</parameter>" * n),
    "tags that nothing closes": lambda n: ("qwen3_coder", "<tool_call><function=f>" * n * 10),
    "messages": lambda n: ("openai", " to=functions.f<|message|>{}" * n),
    "thoughts": lambda n: ("hermes", "</think>" * n * 100),
}


def characters_read(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many characters the checks of depth and Python's readers were given."""
    read = 0
    check, decoder, parse = tool_parts.check_depth, tool_parts._DECODER, tool_formats.ast.parse

    def counted_check(text: str) -> None:
        nonlocal read
        read += len(text)
        check(text)

    class CountedDecoder:
        def decode(self, text: str) -> object:
            nonlocal read
            read += len(text)
            return decoder.decode(text)

        def raw_decode(self, text: str, at: int = 0) -> tuple[object, int]:
            nonlocal read
            value, end = decoder.raw_decode(text, at)
            read += end - at
            return value, end

    def counted_parse(text: str, mode: str) -> object:
        nonlocal read
        read += len(text)
        return parse(text, mode=mode)

    with monkeypatch.context() as patched:
        for module in (tool_parts, tool_formats):
            patched.setattr(module, "check_depth", counted_check)
        patched.setattr(tool_parts, "_DECODER", CountedDecoder())
        patched.setattr(tool_formats.ast, "parse", counted_parse)
        parse_tool_calls(text, name)
    return read


@pytest.mark.parametrize("what", LONG)
def test_the_work_grows_with_the_length_of_the_text(what: str, monkeypatch: pytest.MonkeyPatch):
    for count in (4, 40, 60):
        name, text = LONG[what](count)
        assert characters_read(text, name, monkeypatch) <= 4 * len(text) + 100


def test_a_call_beyond_the_bound_ends_the_reading():
    parsed = parse_tool_calls(json_calls(CALLS_MAX + 1), "llama3_json")
    assert parsed.malformed == (f"more than {CALLS_MAX} calls",)
    assert len(parse_tool_calls(json_calls(CALLS_MAX), "llama3_json").tool_calls) == CALLS_MAX


def test_a_name_of_many_dots_is_none():
    text = "[a" + ".a" * 400 + "(x=1)]"
    parsed = parse_tool_calls(text, "pythonic")
    assert (parsed.content, len(parsed.malformed)) == (text, 1)


def test_tools_of_any_form_are_asked_for_their_names():
    text = WRITTEN["pythonic"]
    for odd in ("x", [], 5, None, {"name": []}, {"name": {"a": 1}}):
        assert not parse_tool_calls(text, "pythonic", [{"function": odd}]).tool_calls


def test_the_format_is_known_from_a_template():
    assert format_of_template("… <tool_call> …") == "hermes"
    assert format_of_template("[TOOL_CALLS]") == "mistral"
    assert format_of_template("{{ '<|python_tag|>' }}") == "llama3_json"
    assert format_of_template("<tool_call><function=f>") == "qwen3_coder"
    assert format_of_template("<tool_call>{name}<arg_key>") == "glm45"
    assert format_of_template("no tools") == "hermes"
    assert format_of_template("{% for tool in tools %}<call-of-mine>") == UNKNOWN
