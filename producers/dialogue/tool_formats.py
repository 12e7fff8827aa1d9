"""The formats in which models write tool calls, by vLLM's names where it has one."""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping

from rollstream.producers.dialogue import tool_markup
from rollstream.producers.dialogue.tool_parts import (
    CALLS_MAX,
    NAME_MAX,
    CallSpan,
    MalformedCall,
    ToolCallFinder,
    ToolSchemas,
    WrittenCall,
    blocks,
    check_depth,
    json_call,
    json_calls,
    read_call_json,
    read_first_json,
    read_span,
    written_call,
)

HARMONY, UNKNOWN = "openai", "unknown"
PYTHON_MAX = 1 << 17
"""Characters of an answer that Python's own parser reads: its tree takes 100 bytes a character."""
_BETWEEN_CALLS = re.compile(r"\s*;?\s*")
_BUILT_IN = re.compile(r"\s*([A-Za-z_]\w{0,127})\.call\(")
_TAKES_TOOLS = re.compile(r"\{[%{][^%}]*\btools\b")

_SIGNS = {
    "<|channel|>commentary": HARMONY,
    "<｜tool▁call": "deepseek_v3",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<minimax:tool_call>": "minimax_m2",
    "<atem:function_calls>": "atem",
    "<seed:tool_call>": "seed_oss",
    "<|tool_call_start|>": "lfm2",
    "<|tool_list_start|>": "lfm2",
    "<|tool_call>call:": "gemma4",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "[TOOL_CALLS]": "mistral",
    "<TOOLCALL>": "nemotron_json",
    "<tool_calls>": "hunyuan_a13b",
    "<|START_ACTION|>": "cohere",
    "functools[": "phi4_mini_json",
    "<tool_call>": "hermes",
    "<|tool_call|>": "granite",
    "<|python_tag|>": "llama3_json",
    "python list": "pythonic",
    '"parameters":': "llama3_json",
}
"""Words of a chat template → the format of its calls; the first that occurs decides."""


def format_of_template(chat_template: str) -> str:
    """Returns `UNKNOWN` if the chat template takes tools in no recognised format."""
    formats = (name for sign, name in _SIGNS.items() if sign in chat_template)
    # A program that describes tools itself, without the template, most likely means Hermes' format.
    default = UNKNOWN if _TAKES_TOOLS.search(chat_template) else "hermes"
    return next(formats, default)


def unknown_format(where: str) -> str:
    return (
        f"the chat template of {where} takes tools, and how its model writes calls is not "
        f"recognised; the known formats are {', '.join(TOOL_FORMATS)}"
    )


def _hermes(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; the end of the
    last may be missing.
    """
    for start, stop, inner in blocks(text, "<tool_call>", "</tool_call>"):
        yield read_span(start, stop, lambda inner=inner: (json_call(read_call_json(inner)),))


def _llama3_json(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`{"name": …, "parameters": {…}}` as the whole answer, several separated by `;`, perhaps after
    `<|python_tag|>`; behind that also `name.call(key="value")`, for built-in tools.
    """
    tag = "<|python_tag|>"
    start = text.find(tag)
    begin = start + len(tag) if start >= 0 else len(text) - len(text.lstrip())
    if start >= 0 and (called := _BUILT_IN.match(text, begin)):
        inner = f"[{called[1]}({text[called.end() :].strip()}]"
        yield read_span(start, len(text), lambda: tuple(_python_calls(inner)))
        return
    if not text[begin:].lstrip().startswith("{"):
        return
    yield read_span(max(0, start), len(text), lambda: tuple(_separated_calls(text[begin:])))


def _separated_calls(text: str) -> Iterator[WrittenCall]:
    check_depth(text)  # once: a check of the rest before each call is quadratic in the calls
    text = text.strip()
    at = count = 0
    while at < len(text):
        if count == CALLS_MAX:
            raise MalformedCall(f"more than {CALLS_MAX} calls")
        value, end = read_first_json(text, at)
        yield json_call(value)
        count += 1
        gap = _BETWEEN_CALLS.match(text, end)
        at = end if gap is None else gap.end()


def _mistral(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}` once for each
    call, also with `[ARGS]` before the arguments.
    """
    sign = "[TOOL_CALLS]"
    start = text.find(sign)
    if start < 0:
        return
    inner = text[start + len(sign) :].strip()

    def calls() -> tuple[WrittenCall, ...]:
        if inner.startswith("["):
            return json_calls(read_call_json(inner))
        return tuple(_named(part) for part in inner.split(sign))

    yield read_span(start, len(text), calls)


def _named(part: str) -> WrittenCall:
    """Reads `name{…}` or `name[ARGS]{…}`."""
    name, brace, arguments = part.partition("{")
    if not brace:
        raise MalformedCall("a call without arguments")
    name, _, id = name.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    return written_call(name, read_call_json(brace + arguments), id)


def _pythonic(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`[name(key=value, …), …]` with Python literals, as the whole answer."""
    inner = text.strip()
    if re.match(r"\[\s*[A-Za-z_][\w.]*\(", inner):
        yield read_span(0, len(text), lambda: tuple(_python_calls(inner)))


def _python_calls(text: str) -> Iterator[WrittenCall]:
    if len(text) > PYTHON_MAX:
        raise MalformedCall(f"more than {PYTHON_MAX} characters")
    check_depth(text)
    try:
        with warnings.catch_warnings():  # else odd literals are named on the role's stderr
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCall(f"not Python: {error}") from error
    if not isinstance(tree, ast.List):
        raise MalformedCall("not a list of calls")
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedCall("not a call with named arguments")
        arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        if None in arguments:
            raise MalformedCall("not a call with named arguments")
        yield written_call(_dotted(call.func), arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    # A loop, since recursion would go as deep as the text has dots.
    while isinstance(node, ast.Attribute) and len(parts) < NAME_MAX:
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise MalformedCall("a call of what is no name")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError) as error:
        raise MalformedCall("an argument that is no literal") from error


def _lfm2(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`<|tool_call_start|>[name(key=value, …), …]<|tool_call_end|>`."""
    for start, stop, inner in blocks(text, "<|tool_call_start|>", "<|tool_call_end|>"):
        yield read_span(start, stop, lambda inner=inner: tuple(_python_calls(inner.strip())))


def _phi4(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`functools[{"name": …, "arguments": {…}}, …]`, up to the end of the answer, or the list
    between `<|tool_call|>` and `<|/tool_call|>`.
    """
    start = text.find("functools[")
    if start < 0:
        yield from _json_between("<|tool_call|>", "<|/tool_call|>")(text, tools)
        return
    inner = text[start + len("functools") :]
    yield read_span(start, len(text), lambda: json_calls(read_call_json(inner)))


def _json_between(begin: str, end: str) -> ToolCallFinder:
    def find(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
        for start, stop, inner in blocks(text, begin, end):
            yield read_span(start, stop, lambda inner=inner: json_calls(read_call_json(inner)))

    return find


TOOL_FORMATS: Mapping[str, ToolCallFinder] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
    HARMONY: tool_markup.harmony,
    "qwen3_coder": tool_markup.QWEN3_CODER.find,
    "glm45": tool_markup.glm,
    "deepseek_v3": tool_markup.deepseek,
    "kimi_k2": tool_markup.kimi,
    "minimax_m2": tool_markup.MINIMAX.find,
    "seed_oss": tool_markup.SEED_OSS.find,
    "atem": tool_markup.ATEM.find,
    "gemma4": tool_markup.gemma4,
    "lfm2": _lfm2,
    "phi4_mini_json": _phi4,
    "granite": _json_between("<|tool_call|>", "<|/tool_call|>"),
    "nemotron_json": _json_between("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": _json_between("<tool_calls>", "</tool_calls>"),
    "cohere": _json_between("<|START_ACTION|>", "<|END_ACTION|>"),
}
OF_MESSAGES = (HARMONY, "atem")
"""Formats in which an answer consists of messages, each with a header."""
WITHOUT_SIGN = ("llama3_json", "pythonic")
"""Formats whose calls have no sign of their own: what looks like one may be an answer."""
