"""The parts of tool calls that all formats share: JSON, names, arguments, and spans of a text.
Every text has a result or a reason, and the work is bounded.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rollstream.streams.foreign_text import reason_text

CALLS_MAX = 64  # calls of one answer; further ones are malformed
DEPTH_MAX = 64  # of brackets in the arguments of a call
NAME_MAX = 128  # characters
REASON_MAX = 200  # characters
ToolSchemas = Sequence[Mapping[str, object]]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_BRACKET = re.compile(r"[\[{(\]})]")


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """`arguments` is the JSON text of an object, `id` is "" in formats without ids."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A part of the text that is meant as calls: the calls, or why it cannot be read."""

    start: int
    end: int
    calls: tuple[WrittenCall, ...] = ()
    reason: str = ""


ToolCallFinder = Callable[[str, ToolSchemas], Iterator[CallSpan]]


class MalformedCall(ValueError):
    """A text that is meant as a call is none; the message names the reason."""


def blocks(text: str, begin: str, end: str) -> Iterator[tuple[int, int, str]]:
    """Yields the start, the end and the inner text of each part; the last may lack its end."""
    at = text.find(begin)
    while at >= 0:
        close = text.find(end, at + len(begin))
        stop = close + len(end) if close >= 0 else len(text)
        yield at, stop, text[at + len(begin) : close if close >= 0 else len(text)]
        at = text.find(begin, stop)


def read_span(start: int, end: int, calls: Callable[[], Sequence[WrittenCall]]) -> CallSpan:
    try:
        # Any fault of a model's text is a reason.
        return CallSpan(start, end, tuple(calls()))
    except MalformedCall as error:
        return CallSpan(start, end, reason=reason_text(error, REASON_MAX))
    except Exception as error:  # noqa: BLE001 (the boundary of one text)
        reason = f"{type(error).__name__}: {reason_text(error, REASON_MAX)}"
        return CallSpan(start, end, reason=reason)


def _refuse_constant(name: str) -> object:
    raise MalformedCall(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_call_json(text: str) -> object:
    check_depth(text)
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"not JSON: {error}") from error


def read_first_json(text: str, at: int) -> tuple[object, int]:
    """Returns the value and its end. The caller has checked the whole text's depth once: a check
    before each value is quadratic.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"not JSON: {error}") from error


def check_depth(text: str) -> None:
    """Raises `MalformedCall` for brackets nested too deeply, those inside of strings included."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        if bracket[0] in "[{(":
            depth += 1
            if depth > DEPTH_MAX:
                raise MalformedCall(f"nested deeper than {DEPTH_MAX}")
        else:
            depth = max(0, depth - 1)


def json_call(value: object) -> WrittenCall:
    """Reads `{"name": …, "arguments" or "parameters": {…}}`; the arguments may be JSON text."""
    if not isinstance(value, dict):
        raise MalformedCall("not an object with a name")
    table = cast(dict[str, object], value)
    name = table.get("name", table.get("tool_name"))
    if not isinstance(name, str):
        raise MalformedCall("not an object with a name")
    arguments = table.get("arguments", table.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_call_json(arguments)
    return written_call(name, arguments, table.get("id"))


def json_calls(value: object) -> tuple[WrittenCall, ...]:
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return tuple(json_call(each) for each in values)


def written_call(name: str, arguments: object, id: object = "") -> WrittenCall:
    """Returns the call, if its name is one and its arguments are an object."""
    if not _NAME.fullmatch(name):
        raise MalformedCall("a name that is none")
    is_id = isinstance(id, str) and _ID.fullmatch(id)
    return WrittenCall(name, _object_text(arguments), str(id) if is_id else "")


def _object_text(arguments: object) -> str:
    if not isinstance(arguments, Mapping):
        raise MalformedCall("arguments that are no object")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedCall(f"arguments that are no JSON: {error}") from error
    return text


def typed_arguments(name: str, texts: Mapping[str, str], tools: ToolSchemas) -> dict[str, object]:
    """Returns arguments without quotes as the tool declares them: a text as it is, others as
    JSON.
    """
    declared = _properties(name, tools)
    return {key: _typed(text, declared.get(key)) for key, text in texts.items()}


def _typed(text: str, schema: object) -> object:
    if isinstance(schema, Mapping):
        kind = cast("Mapping[str, object]", schema).get("type")
        if kind in ("string", ["string"]):
            return text
    try:
        return read_call_json(text)
    except MalformedCall:
        return text


def _properties(name: str, tools: ToolSchemas) -> Mapping[str, object]:
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            continue
        table = cast("Mapping[str, object]", function)
        parameters = table.get("parameters")
        if table.get("name") == name and isinstance(parameters, Mapping):
            properties = cast("Mapping[str, object]", parameters).get("properties")
            if isinstance(properties, Mapping):
                return cast("Mapping[str, object]", properties)
    return {}
