"""The messages with which a chat template is tried, and the form in which it takes calls, which
differs between makers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollstream.streams.foreign_text import ForeignValueRefused, read_json

ChatMessage = Mapping[str, Any]
"""One message in the form of OpenAI's protocol."""
ToolSchema = Mapping[str, Any]
"""One tool in the form of OpenAI's protocol: `{"type": "function", "function": {…}}`."""

MARK = "rollstream-answer"
ARGUMENT = "rollstream"  # the name of the argument that has the mark
QUESTION: ChatMessage = {"role": "user", "content": "?"}
TOOL_NAME = "a_tool"
SAMPLE_CALL: Mapping[str, Any] = {
    "id": "call_0",
    "type": "function",
    "function": {"name": TOOL_NAME, "arguments": {}},
}
SAMPLE_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "?",
        "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of messages with calls: `arguments` as an object or JSON text, an empty `content` as
    "" or None, ids as they are or as nine letters and digits (Mistral's templates).
    """

    is_object: bool = True
    empty: str | None = ""
    has_short_ids: bool = False

    def message(self, message: ChatMessage) -> dict[str, Any]:
        written = dict(message)
        if calls := written.get("tool_calls"):
            written["tool_calls"] = [self._call(call) for call in calls]
            if not written.get("content"):
                written["content"] = self.empty
        else:
            written.pop("tool_calls", None)
        if self.has_short_ids and isinstance(written.get("tool_call_id"), str):
            written["tool_call_id"] = _short(written["tool_call_id"])
        return written

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function: dict[str, Any] = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if self.is_object and isinstance(arguments, str):
            # Else the template prints the text that the model wrote.
            with suppress(ForeignValueRefused):
                function["arguments"] = read_json(arguments)
        elif not self.is_object and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        written: dict[str, Any] = {"type": "function", **call, "function": function}
        if self.has_short_ids and isinstance(written.get("id"), str):
            written["id"] = _short(written["id"])
        return written


CALL_FORMS = tuple(
    CallForm(is_object, empty, has_short_ids)
    for has_short_ids in (False, True)
    for is_object in (True, False)
    for empty in ("", None)
)


def marked(calls: Sequence[Mapping[str, Any]], mark: str) -> dict[str, Any]:
    """Returns an answer with the mark as its content, or as an argument of its last call."""
    if not calls:
        return {"role": "assistant", "content": mark}
    last: dict[str, Any] = dict(calls[-1])
    last["function"] = {**(last.get("function") or {}), "arguments": {ARGUMENT: mark}}
    return {"role": "assistant", "content": "", "tool_calls": [*map(dict, calls[:-1]), last]}


def _short(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", name):
        return name
    return blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:9]
