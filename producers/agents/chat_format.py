"""Converts chat messages to text and tokens, and an answer's tokens to text and tool calls
(`ChatFormat`): what the endpoint needs to know about a model.

A task of texts uses the chat template of the run's tokenizer (`TemplateChat`). A tokenizer without
one, such as that of the small built-in tasks, gets the messages' texts one after the other
(`PlainChat`). A `TurnBridge` (`renderer_bridge`) knows a model's chat without its template.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

from rollstream.errors import RollstreamError
from rollstream.producers.tasks.base import Task, Tokenizer
from rollstream.producers.tasks.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.tool_calls import (
    ParsedAnswer,
    likely_format,
    parse_tool_calls,
)

JsonObject = Mapping[str, Any]
"""An object of a request's JSON."""


_MARK = "rollstream-text"  # stands for a message, to find what the template puts around it


class ChatRefused(RollstreamError, ValueError):
    """Raised for messages that the chat template refuses; the message states why."""


class TurnBridge(Protocol):
    """Knows what stands between two answers without rendering the messages before them."""

    def added_tokens(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        """Return the tokens that these new `messages` add behind `prompt` and `answer`, up to the
        next answer; None if that is not known.
        """
        ...


class ChatFormat(Protocol):
    """Renders and parses a model's chat."""

    @property
    def end_text(self) -> str:
        """Text of the token that ends an assistant's turn in a rendered chat; "" without one."""
        ...

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], is_asked: bool
    ) -> str:
        """Return the messages as text; `is_asked`: with the beginning of the assistant's answer.
        Raises `ChatRefused`.
        """
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...

    def user_text(self, prompt: Sequence[int]) -> str:
        """Return the user's message in a prompt of one message; else the prompt's text."""
        ...

    def bridged(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        """Return what a turn's bridge returns (`TurnBridge.added_tokens`); None without one."""
        ...

    def parse(self, text: str, tools: Sequence[JsonObject], call_prefix: str) -> ParsedAnswer:
        """Return the parts of an answer; ids of tool calls begin with `call_prefix`."""
        ...


def _parsed(
    text: str, tools: Sequence[JsonObject], call_prefix: str, tool_format: str
) -> ParsedAnswer:
    """Parse tool calls if the request names tools; else the whole text is the content."""
    if not tools:
        return ParsedAnswer(text)
    return parse_tool_calls(text, tool_format, tools, lambda index: f"{call_prefix}{index}")


class PlainChat:
    """Implements `ChatFormat` without a template: the texts of the messages, one after the
    other.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "hermes") -> None:
        self._tokenizer, self._tool_format = tokenizer, tool_format

    @property
    def end_text(self) -> str:
        return ""

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], is_asked: bool
    ) -> str:
        return "".join(text_of(message.get("content")) for message in messages)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def user_text(self, prompt: Sequence[int]) -> str:
        return self.decode(prompt)

    def bridged(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        return None

    def parse(self, text: str, tools: Sequence[JsonObject], call_prefix: str) -> ParsedAnswer:
        return _parsed(text, tools, call_prefix, self._tool_format)


class TemplateChat:
    """Implements `ChatFormat` by the chat template of a tokenizer; a `bridge`, if any, comes before
    the template where a turn continues another one.
    """

    def __init__(
        self, tokenizer: TextTokenizer, tool_format: str, bridge: TurnBridge | None = None
    ) -> None:
        self.tokenizer, self.tool_format, self.bridge = tokenizer, tool_format, bridge

    @property
    def end_text(self) -> str:
        return self._end_text

    @cached_property
    def _end_text(self) -> str:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        after = self.render(chat, (), is_asked=False).rpartition(_MARK)[2]
        first = self.tokenizer.encode(after)[:1]
        added = self.tokenizer.light.get_added_tokens_decoder()
        return added[first[0]].content if first and first[0] in added else ""

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], is_asked: bool
    ) -> str:
        from jinja2 import TemplateError

        given = [_for_template(message) for message in messages]
        try:
            rendered: Any = self.tokenizer.whole.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                given,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_asked,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChatRefused(
                f"the chat template of {self.tokenizer.where} refuses: {error}"
            ) from error
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def user_text(self, prompt: Sequence[int]) -> str:
        before, _, after = self.render(
            [{"role": "user", "content": _MARK}], (), is_asked=True
        ).partition(_MARK)
        text = self.tokenizer.light.decode(list(prompt), skip_special_tokens=False)
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)]
        return self.decode(prompt)

    def bridged(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        if self.bridge is None:
            return None
        given = [_for_template(message) for message in messages]
        return self.bridge.added_tokens(prompt, answer, given, tools)

    def parse(self, text: str, tools: Sequence[JsonObject], call_prefix: str) -> ParsedAnswer:
        return _parsed(text, tools, call_prefix, self.tool_format)


def chat_format(task: Task, tool_format: str = "auto") -> ChatFormat:
    """Return the format of the run's tokenizer. With `auto` the chat template decides how tools are
    called.
    """
    tokenizer = task.tokenizer()
    template = ""
    if isinstance(tokenizer, TextTokenizer):
        template = str(tokenizer.whole.chat_template or "")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if tool_format == "auto":
        tool_format = likely_format(template)
    if isinstance(tokenizer, TextTokenizer) and template:
        return TemplateChat(tokenizer, tool_format)
    return PlainChat(tokenizer, tool_format)


def text_of(content: object) -> str:
    """Return the text of a message's `content`: a text, or the texts of its parts; "" for None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatRefused(f"content is a {type(content).__name__}, not text or a list of parts")
    texts: list[str] = []
    for part in content:  # pyright: ignore[reportUnknownVariableType]
        text: Any = part.get("text") if isinstance(part, dict) else part  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(text, str):
            raise ChatRefused("a part of a message is not text; images and audio are not served")
        texts.append(text)
    return "".join(texts)


def _for_template(message: JsonObject) -> dict[str, Any]:
    """Return the message as templates expect it: text as content, arguments of calls as objects."""
    given: dict[str, Any] = {**message, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        given["tool_calls"] = [_call_for_template(call) for call in calls]
    else:
        given.pop("tool_calls", None)
    return given


def _call_for_template(call: JsonObject) -> dict[str, Any]:
    function: dict[str, Any] = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # else the template prints the text that the model wrote
            function["arguments"] = json.loads(arguments)
    return {"type": "function", **call, "function": function}
