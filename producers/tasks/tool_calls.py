"""Finds the tool calls in a model's answer (`parse_tool_calls`), in the formats that vLLM parses
and under its names (`TOOL_FORMATS`).

The functions are pure, and every text has a result: a call that cannot be read stays in the content
as it was written, and is named in `malformed`. Sizes, nesting and the number of calls are bounded,
no text is executed, and all results can be encoded as UTF-8 and JSON.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

TEXT_MAX = 1 << 20  # characters of an answer that are searched for calls
CALLS_MAX = 64  # calls of one answer; further ones are malformed
DEPTH_MAX = 64  # of brackets in the arguments of a call
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one call of a tool. `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Holds the parts of an answer: its text (`content`), what was thought before it
    (`reasoning`, the text up to `</think>`), and the calls. `malformed` has the reason for each
    call that could not be read.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A part of the text that is meant as calls: (name, arguments) pairs, or the reason why it
    cannot be read.
    """

    start: int
    end: int
    calls: tuple[tuple[str, str], ...] = ()
    reason: str = ""


ToolCallFinder = Callable[[str], Iterator[_Found]]


class _Malformed(ValueError):
    """A text that is meant as a call is none; the message names the reason."""


def parse_tool_calls(
    text: str,
    tool_format: str = "hermes",
    tools: Sequence[Mapping[str, object]] = (),
    new_id: Callable[[int], str] = lambda index: f"call_{index}",
) -> ParsedAnswer:
    """Return the parts of an answer. `tool_format` is one of `TOOL_FORMATS`; `new_id` gives the id
    of the call at an index. `tools` are those that may be called, as OpenAI's protocol writes them:
    in a format whose calls have no sign of their own, a call of another name is content.
    """
    find = TOOL_FORMATS[tool_format]
    reasoning, content = _split_thought(text)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    kept: list[str] = []
    at = 0
    for found in find(content[:TEXT_MAX]):
        reason = found.reason
        if tool_format in _WITHOUT_SIGN and tools:
            unknown = {name for name, _ in found.calls} - _names(tools)
            reason = reason or ("a tool that is not known" if unknown else "")
        if not reason and len(calls) + len(found.calls) > CALLS_MAX:
            reason = f"more than {CALLS_MAX} calls"
        if reason:
            malformed.append(reason)
            kept.append(content[at : found.end])
        else:
            kept.append(content[at : found.start])
            for name, arguments in found.calls:
                calls.append(ToolCall(name, arguments, new_id(len(calls))))
        at = found.end
    kept.append(content[at:])
    said = "".join(kept)
    said = said.strip() if calls else said
    return ParsedAnswer(said, reasoning, tuple(calls), tuple(malformed[:CALLS_MAX]))


def _names(tools: Sequence[Mapping[str, object]]) -> set[object]:
    functions = (cast(Mapping[str, object], tool.get("function") or {}) for tool in tools)
    return {function.get("name") for function in functions}


def likely_format(chat_template: str) -> str:
    """Return the format in which models of this chat template call tools, by its words; `hermes`
    where no other is recognised.
    """
    signs = {
        "[TOOL_CALLS]": "mistral",
        "<tool_call>": "hermes",
        "<|python_tag|>": "llama3_json",
        "python list": "pythonic",
        '"parameters":': "llama3_json",
    }
    found = (name for sign, name in signs.items() if sign in chat_template)
    return next(found, "hermes")


def _split_thought(text: str) -> tuple[str, str]:
    before, end, after = text.partition(_END_OF_THOUGHT)
    if not end:
        return "", text
    return before.removeprefix("<think>").strip(), after.lstrip("\n")


# ---- formats -------------------------------------------------------------------------------------


def _hermes(text: str) -> Iterator[_Found]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; the end of the
    last may be missing.
    """
    begin, end = "<tool_call>", "</tool_call>"
    at = text.find(begin)
    while at >= 0:
        close = text.find(end, at)
        inner = text[at + len(begin) : close if close >= 0 else len(text)]
        stop = close + len(end) if close >= 0 else len(text)
        yield _read(at, stop, lambda inner=inner: (_json_call(_json(inner)),))
        at = text.find(begin, stop)


def _llama3_json(text: str) -> Iterator[_Found]:
    """`{"name": …, "parameters": {…}}` as the whole answer, several separated by `;`, perhaps after
    `<|python_tag|>`.
    """
    tag = "<|python_tag|>"
    start = text.find(tag)
    begin = start + len(tag) if start >= 0 else len(text) - len(text.lstrip())
    if not text[begin:].lstrip().startswith("{"):
        return
    yield _read(max(0, start), len(text), lambda: tuple(_json_calls(text[begin:])))


def _json_calls(text: str) -> Iterator[tuple[str, str]]:
    rest = text.strip()
    while rest:
        _check_depth(rest)
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise _Malformed(f"not JSON: {error}") from error
        yield _json_call(value)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()


def _mistral(text: str) -> Iterator[_Found]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}` once for each
    call, also with `[ARGS]` before the arguments.
    """
    sign = "[TOOL_CALLS]"
    start = text.find(sign)
    if start < 0:
        return
    inner = text[start + len(sign) :].strip()

    def calls() -> tuple[tuple[str, str], ...]:
        if inner.startswith("["):
            values = _json(inner)
            if not isinstance(values, list):
                raise _Malformed("not a list of calls")
            return tuple(_json_call(value) for value in cast(list[object], values))
        return tuple(_named(part) for part in inner.split(sign))

    yield _read(start, len(text), calls)


def _named(part: str) -> tuple[str, str]:
    """Read `name{…}` or `name[ARGS]{…}`."""
    name, brace, arguments = part.partition("{")
    if not brace:
        raise _Malformed("a call without arguments")
    name = name.strip().removesuffix("[ARGS]").partition("[CALL_ID]")[0]
    return _name(name), _object(_json(brace + arguments))


def _pythonic(text: str) -> Iterator[_Found]:
    """`[name(key=value, …), …]` with Python literals, as the whole answer."""
    inner = text.strip()
    if re.match(r"\[\s*[A-Za-z_][\w.]*\(", inner):
        yield _read(0, len(text), lambda: tuple(_python_calls(inner)))


def _python_calls(text: str) -> Iterator[tuple[str, str]]:
    _check_depth(text)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Malformed(f"not Python: {error}") from error
    if not isinstance(tree, ast.List):
        raise _Malformed("not a list of calls")
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args:
            raise _Malformed("not a call with named arguments")
        arguments = {one.arg: _literal(one.value) for one in call.keywords}
        if None in arguments:
            raise _Malformed("not a call with named arguments")
        yield _name(ast.unparse(call.func)), _object(arguments)


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _Malformed("an argument that is no literal") from error


TOOL_FORMATS: Mapping[str, ToolCallFinder] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}
"""vLLM's name of a format → the function that finds its calls."""
_WITHOUT_SIGN = ("llama3_json", "pythonic")


# ---- parts of a call -----------------------------------------------------------------------------


def _read(start: int, end: int, calls: Callable[[], Sequence[tuple[str, str]]]) -> _Found:
    try:
        return _Found(start, end, tuple(calls()))
    except _Malformed as error:
        return _Found(start, end, reason=str(error)[:200].encode(errors="replace").decode())


def _refuse_constant(name: str) -> object:
    raise _Malformed(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _json(text: str) -> object:
    _check_depth(text)
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"not JSON: {error}") from error


def _check_depth(text: str) -> None:
    """Refuse brackets that are nested deeper than parsers can go; those inside of strings count
    too.
    """
    depth = 0
    for letter in text:
        if letter in "[{(":
            depth += 1
            if depth > DEPTH_MAX:
                raise _Malformed(f"nested deeper than {DEPTH_MAX}")
        elif letter in "]})":
            depth = max(0, depth - 1)


def _json_call(value: object) -> tuple[str, str]:
    """Read `{"name": …, "arguments" or "parameters": {…}}`; the arguments may be JSON text."""
    if not isinstance(value, dict):
        raise _Malformed("not an object with a name")
    table = cast(dict[str, object], value)
    name = table.get("name")
    if not isinstance(name, str):
        raise _Malformed("not an object with a name")
    arguments = table.get("arguments", table.get("parameters", {}))
    return _name(name), _object(_json(arguments) if isinstance(arguments, str) else arguments)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _Malformed("a name that is none")
    return name


def _object(arguments: object) -> str:
    if not isinstance(arguments, Mapping):
        raise _Malformed("arguments that are no object")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Malformed(f"arguments that are no JSON: {error}") from error
    return text
