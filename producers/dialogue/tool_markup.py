"""Finds tool calls that models write as markup: tags with one argument each (`TagDialect`), or
special tokens around names and arguments.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollstream.producers.dialogue.tool_parts import (
    CallSpan,
    MalformedCall,
    ToolSchemas,
    WrittenCall,
    blocks,
    json_call,
    read_call_json,
    read_span,
    typed_arguments,
    written_call,
)


@dataclass(frozen=True, slots=True)
class TagDialect:
    """The tags of a format; the patterns `call` and `argument` have the name as their group."""

    begin: str
    end: str
    call: str
    call_end: str
    argument: str
    argument_end: str

    def find(self, text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
        for start, stop, inner in blocks(text, self.begin, self.end):
            yield read_span(start, stop, lambda inner=inner: self._calls(inner, tools))

    def _calls(self, inner: str, tools: ToolSchemas) -> tuple[WrittenCall, ...]:
        if inner.lstrip().startswith("{"):  # a model that falls back to JSON
            return (json_call(read_call_json(inner)),)
        opening = re.compile(self.call)
        following = re.compile(f"{self.argument}|{re.escape(self.call_end)}")
        calls: list[WrittenCall] = []
        begun = opening.search(inner)
        if begun is None:
            raise MalformedCall("a call without a name")
        while begun is not None:
            name, at, texts = begun[1].strip(), begun.end(), dict[str, str]()
            while (part := following.search(inner, at)) and part[1] is not None:
                close = inner.find(self.argument_end, part.end())
                if close < 0:
                    raise MalformedCall("an argument without its end")
                texts[part[1].strip()] = _without_breaks(inner[part.end() : close])
                at = close + len(self.argument_end)
            calls.append(written_call(name, typed_arguments(name, texts, tools)))
            begun = opening.search(inner, at if part is None else part.end())
        return tuple(calls)


def _without_breaks(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


QWEN3_CODER = TagDialect(
    "<tool_call>", "</tool_call>", r"<function=([^>\n]+)>", "</function>",
    r"<parameter=([^>\n]+)>", "</parameter>",
)  # fmt: skip
SEED_OSS = TagDialect(
    "<seed:tool_call>", "</seed:tool_call>", r"<function=([^>\n]+)>", "</function>",
    r"<parameter=([^>\n]+)>", "</parameter>",
)  # fmt: skip
MINIMAX = TagDialect(
    "<minimax:tool_call>", "</minimax:tool_call>", r'<invoke name="?([^">\n]+)"?>', "</invoke>",
    r'<parameter name="?([^">\n]+)"?>', "</parameter>",
)  # fmt: skip
ATEM = TagDialect(
    "<atem:function_calls>", "</atem:function_calls>", r'<atem:invoke name="([^">\n]+)">',
    "</atem:invoke>", r'<atem:parameter name="([^">\n]+)">', "</atem:parameter>",
)  # fmt: skip

_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_END = "</arg_value>"


def glm(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""
    for start, stop, inner in blocks(text, "<tool_call>", "</tool_call>"):
        yield read_span(start, stop, lambda inner=inner: (_glm_call(inner, tools),))


def _glm_call(inner: str, tools: ToolSchemas) -> WrittenCall:
    if inner.lstrip().startswith("{"):
        return json_call(read_call_json(inner))
    part = _GLM_ARGUMENT.search(inner)
    name, texts = (inner if part is None else inner[: part.start()]).strip(), dict[str, str]()
    while part is not None:
        close = inner.find(_GLM_END, part.end())
        if close < 0:
            raise MalformedCall("an argument without its end")
        texts[part[1].strip()] = _without_breaks(inner[part.end() : close])
        part = _GLM_ARGUMENT.search(inner, close)
    return written_call(name, typed_arguments(name, texts, tools))


def deepseek(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then the arguments as a block of JSON, or
    `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}` (V3.1), each with its end, all of them in one
    pair of `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
    """
    for start, stop, inner in blocks(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"):
        yield read_span(start, stop, lambda inner=inner: _each(inner, *_DEEPSEEK_CALL))


_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")


def kimi(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, all of
    them in one section.
    """
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    for start, stop, inner in blocks(text, begin, end):
        yield read_span(start, stop, lambda inner=inner: _each(inner, *_KIMI_CALL))


_NUMBERED = re.compile(r"functions\.(.+):\d+")  # Kimi's ids
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>")


def _each(inner: str, begin: str, end: str, between: str) -> tuple[WrittenCall, ...]:
    calls = tuple(_divided(part, between) for _, _, part in blocks(inner, begin, end))
    if not calls:
        raise MalformedCall("no call between the tokens of calls")
    return calls


def _divided(part: str, between: str) -> WrittenCall:
    head, sign, arguments = part.partition(between)
    if not sign:
        raise MalformedCall("a call without arguments")
    head = head.strip()
    if "```json" in arguments:
        name, _, fenced = arguments.partition("```json")
        return written_call(name.strip(), read_call_json(fenced.partition("```")[0]))
    if numbered := _NUMBERED.fullmatch(head):
        return written_call(numbered[1], read_call_json(arguments), head)
    return written_call(head, read_call_json(arguments))


_GEMMA_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")


def gemma4(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`."""
    for start, stop, inner in blocks(text, "<|tool_call>", "<tool_call|>"):
        yield read_span(start, stop, lambda inner=inner: (_gemma_call(inner),))


def _gemma_call(inner: str) -> WrittenCall:
    name, brace, rest = inner.strip().removeprefix("call:").partition("{")
    parts = (brace + rest).split(_GEMMA_QUOTE)
    texts = [
        json.dumps(part) if place % 2 else _GEMMA_KEY.sub(r'\1"\2":', part)
        for place, part in enumerate(parts)
    ]
    return written_call(name.strip(), read_call_json("".join(texts)))


# ---- answers of several messages -----------------------------------------------------------------

_MESSAGE = "<|message|>"
_MESSAGE_END = re.compile(r"<\|(?:end|return|call|start|eom|eot)\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_THOUGHT = re.compile(r"<\|channel\|>analysis|\bto=self\b")


def split_messages(text: str) -> tuple[str, str]:
    """Returns the thoughts of an answer of several messages (gpt-oss, Muse), and the rest as
    written.
    """
    thoughts: list[str] = []
    rest: list[str] = []
    for _, raw, header, body in _messages(text):
        if _RECIPIENT.search(header):
            rest.append(raw)
        else:
            (thoughts if _THOUGHT.search(header) else rest).append(body)
    return "\n".join(thoughts).strip(), "".join(rest)


def harmony(text: str, tools: ToolSchemas) -> Iterator[CallSpan]:
    """` to=functions.name<|channel|>commentary json<|message|>{…}<|call|>`."""
    for start, raw, header, body in _messages(text):
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            yield read_span(
                start,
                start + len(raw),
                lambda name=recipient[1], body=body: (written_call(name, read_call_json(body)),),
            )


def _messages(text: str) -> Iterator[tuple[int, str, str, str]]:
    at = 0
    while (middle := text.find(_MESSAGE, at)) >= 0:
        close = _MESSAGE_END.search(text, middle)
        stop = len(text) if close is None else close.start()
        end = len(text) if close is None else close.end()
        if close is not None and close[0] == "<|start|>":
            end = stop
        yield at, text[at:end], text[at:middle], text[middle + len(_MESSAGE) : stop]
        at = end
    # A text behind the last message, or without any, is a body.
    if at < len(text):
        yield at, text[at:], "", text[at:]
