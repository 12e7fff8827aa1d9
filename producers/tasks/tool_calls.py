"""Finds the tool calls in an answer. Sizes, nesting and number are bounded, no text is executed,
and all results can be encoded as UTF-8 and JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rollstream.producers.dialogue.tool_formats import OF_MESSAGES, TOOL_FORMATS, WITHOUT_SIGN
from rollstream.producers.dialogue.tool_markup import split_messages
from rollstream.producers.dialogue.tool_parts import CALLS_MAX
from rollstream.streams.foreign_text import clean_text

TEXT_MAX = 1 << 20  # characters of an answer that are searched for calls
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one call of a tool. `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`reasoning` ends at `</think>`; `malformed` has the reason for each call that could not be
    read.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


def parse_tool_calls(
    text: str,
    tool_format: str = "hermes",
    tools: Sequence[Mapping[str, object]] = (),
    new_id: Callable[[int], str] = lambda index: f"call_{index}",
) -> ParsedAnswer:
    """`tool_format` is one of `TOOL_FORMATS`; `new_id` gives the id of the call at an index."""
    find = TOOL_FORMATS[tool_format]
    split = split_messages if tool_format in OF_MESSAGES else _split_thought
    reasoning, content = split(clean_text(text))
    calls: list[ToolCall] = []
    malformed: list[str] = []
    content_parts: list[str] = []
    at = 0
    for span in find(content[:TEXT_MAX], tools):
        reason = span.reason
        # In a format whose calls have no sign of their own, a call of another name is content.
        if tool_format in WITHOUT_SIGN and tools:
            unknown = {call.name for call in span.calls} - _names(tools)
            reason = reason or ("a tool that is not known" if unknown else "")
        if not reason and len(calls) + len(span.calls) > CALLS_MAX:
            reason = f"more than {CALLS_MAX} calls"
        if reason:
            malformed.append(reason)
            content_parts.append(content[at : span.end])
        else:
            content_parts.append(content[at : span.start])
            for call in span.calls:
                used = {each.id for each in calls}
                id = call.id if call.id and call.id not in used else new_id(len(calls))
                calls.append(ToolCall(call.name, call.arguments, id))
        at = span.end
    content_parts.append(content[at:])
    content_text = "".join(content_parts)
    content_text = content_text.strip() if calls else content_text
    return ParsedAnswer(content_text, reasoning, tuple(calls), tuple(malformed[:CALLS_MAX]))


def _names(tools: Sequence[Mapping[str, object]]) -> set[str]:
    functions = [tool.get("function") for tool in tools]
    names = [
        cast("Mapping[str, object]", each).get("name")
        for each in functions
        if isinstance(each, Mapping)
    ]
    return {name for name in names if isinstance(name, str)}


def _split_thought(text: str) -> tuple[str, str]:
    before, end, after = text.partition(_END_OF_THOUGHT)
    if not end:
        return "", text
    return before.removeprefix("<think>").strip(), after.lstrip("\n")
