"""Parses the tool calls in a model's answer (`parse_tool_calls`), in the format of Hermes: a JSON
object with `name` and `arguments` between `<tool_call>` and `</tool_call>`. Pure.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one call of a tool; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Holds an answer's parts. A call that cannot be parsed stays in `content` as it was, and
    `malformed` names the reason.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def parse_tool_calls(
    text: str,
    tool_format: str = "hermes",
    tools: Sequence[Mapping[str, object]] = (),
    new_id: Callable[[int], str] = "call_{}".format,
) -> ParsedAnswer:
    """Return the answer's content and tool calls."""
    calls: list[ToolCall] = []
    malformed: list[str] = []

    def take(match: re.Match[str]) -> str:
        try:
            parsed: Any = json.loads(match.group(1))
            name, arguments = parsed["name"], parsed.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("name and arguments are not a text and an object")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            malformed.append(f"{type(error).__name__}: {error}")
            return match.group(0)
        whole = json.dumps(cast("dict[str, Any]", arguments))
        calls.append(ToolCall(name, whole, new_id(len(calls))))
        return ""

    content = _CALL.sub(take, text)
    return ParsedAnswer(content.strip() if calls else content, "", tuple(calls), tuple(malformed))
