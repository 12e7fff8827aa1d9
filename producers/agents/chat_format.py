"""Converts chat messages to tokens, and an answer's tokens to text and tool calls."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, cast

from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.producers.dialogue.chat_template import ChatTemplate
from rollstream.producers.dialogue.template_messages import MARK
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.dialogue.tool_formats import (
    OF_MESSAGES,
    UNKNOWN,
    format_of_template,
    unknown_format,
)
from rollstream.producers.tasks.base import Task, Tokenizer
from rollstream.producers.tasks.tool_calls import ParsedAnswer, parse_tool_calls
from rollstream.streams.foreign_text import (
    ForeignValueRefused,
    joined_parts,
)

_SYSTEM_MARK = "rollstream-system"
JsonObject = Mapping[str, Any]


log = logging.getLogger(__name__)


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
        """Returns the tokens behind `prompt` and `answer`, up to the next answer; None if
        unknown.
        """
        ...


class ChatFormat(Protocol):
    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], is_asked: bool
    ) -> str:
        """Returns the messages as text, with `is_asked` up to the begin of the answer. Raises
        `ChatRefused`.
        """
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text without special tokens."""
        ...

    def user_text(self, prompt: Sequence[int]) -> str:
        """Returns the user's message of a prompt with no other but a system message, else the whole
        text.
        """
        ...

    def system_text(self, prompt: Sequence[int]) -> str:
        """Returns the system message of such a prompt, "" without one."""
        ...

    def bridged(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None: ...

    def continuation(
        self,
        rendered: str,
        messages: Sequence[JsonObject],
        count: int,
        tools: Sequence[JsonObject],
        last: int | None,
    ) -> str | None:
        """Returns the text of the messages behind the first `count`, the last of which is an answer
        that ends in the token `last` (None: it was cut off); None if the messages before that
        answer are rendered otherwise than when it was requested.
        """
        ...

    def parse(
        self, tokens: Sequence[int], tools: Sequence[JsonObject], call_prefix: str
    ) -> ParsedAnswer:
        """Returns the parts of an answer; the ids of its calls begin with `call_prefix`."""
        ...


class PlainChat:
    def __init__(self, tokenizer: Tokenizer, tool_format: str = "hermes") -> None:
        self._tokenizer, self._tool_format = tokenizer, tool_format

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

    def system_text(self, prompt: Sequence[int]) -> str:
        return ""

    def bridged(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        return None

    def continuation(
        self,
        rendered: str,
        messages: Sequence[JsonObject],
        count: int,
        tools: Sequence[JsonObject],
        last: int | None,
    ) -> str | None:
        return self.render(messages[count:], tools, is_asked=True)

    def parse(
        self, tokens: Sequence[int], tools: Sequence[JsonObject], call_prefix: str
    ) -> ParsedAnswer:
        text = self.decode(tokens)
        if not tools:
            return ParsedAnswer(text)
        return parse_tool_calls(text, self._tool_format, tools, lambda at: f"{call_prefix}{at}")


class TemplateChat:
    """A tokenizer's chat template; where a turn continues another one, a `bridge` comes first."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        tool_format: str,
        bridge: TurnBridge | None = None,
        system: str = "",
    ) -> None:
        self.tokenizer, self.tool_format, self.bridge = tokenizer, tool_format, bridge
        self.system = system  # the message that the task puts before its prompts
        self.template = ChatTemplate(tokenizer)
        self._around: dict[str, tuple[str, str]] = {}

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], is_asked: bool
    ) -> str:
        if tools and self.tool_format == UNKNOWN:
            raise ChatRefused(f"{unknown_format(self.tokenizer.where)}: set agent.tool_format")
        plain_messages = self._given(messages)
        try:
            for place, message in enumerate(plain_messages):
                self.template.refuse_left_out(str(message.get("role")), is_first=not place)
            return self.template.render(plain_messages, tools, is_asked)
        except ConfigurationError as error:
            raise ChatRefused(str(error)) from error

    def _given(self, messages: Sequence[JsonObject]) -> list[dict[str, Any]]:
        plain_messages = [
            {**message, "content": text_of(message.get("content"))} for message in messages
        ]
        return [dict(message) for message in self.template.with_own_roles(plain_messages)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def _around_user(self, system: str = "") -> tuple[str, str]:
        if system not in self._around:
            self._around[system] = self._written_around_user(system)
        return self._around[system]

    def _written_around_user(self, system: str) -> tuple[str, str]:
        messages = [{"role": "system", "content": system}] if system else []
        try:
            rendered = self.render(
                [*messages, {"role": "user", "content": MARK}], (), is_asked=True
            )
        except ChatRefused:
            # The template refuses a system message.
            return "", ""
        before, _, after = rendered.partition(MARK)
        return before, after

    @cached_property
    def _around_system(self) -> tuple[str, str, str]:
        before, after = self._around_user(_SYSTEM_MARK)
        before, _, between = before.partition(_SYSTEM_MARK)
        # Only a sign of the template, which no text has, can separate the two messages.
        return (before, between, after) if between.strip() else ("", "", "")

    def _asked(self, prompt: Sequence[int]) -> tuple[str, str] | None:
        text = self.tokenizer.light.decode(list(prompt), skip_special_tokens=False)
        if self.system and (user := _within(text, *self._around_user(self.system))) is not None:
            return self.system, user
        before, between, after = self._around_system
        within = _within(text, before, after)
        if between and within is not None and within.count(between) == 1:
            system, _, user = within.partition(between)
            return system, user
        user = _within(text, *self._around_user())
        return None if user is None else ("", user)

    def user_text(self, prompt: Sequence[int]) -> str:
        texts = self._asked(prompt)
        return self.decode(prompt) if texts is None else texts[1]

    def system_text(self, prompt: Sequence[int]) -> str:
        texts = self._asked(prompt)
        return "" if texts is None else texts[0]

    def bridged(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        if self.bridge is None:
            return None
        plain_messages = self._given(messages)
        return self.bridge.added_tokens(prompt, answer, plain_messages, tools)

    def continuation(
        self,
        rendered: str,
        messages: Sequence[JsonObject],
        count: int,
        tools: Sequence[JsonObject],
        last: int | None,
    ) -> str | None:
        plain_messages = self._given(messages)
        history, answer, further = (
            plain_messages[: count - 1],
            plain_messages[count - 1],
            plain_messages[count:],
        )
        has_calls = any(message.get("tool_calls") for message in messages)
        # A fork would lose the calls that such a template leaves out of earlier answers.
        must_continue = has_calls and not self.template.shows_calls
        before = "" if must_continue else self.render(messages[: count - 1], tools, is_asked=True)
        if not rendered.startswith(before):
            return None
        try:
            text = self.template.continuation(
                history, answer.get("tool_calls") or (), further, tools, last, last is not None
            )
        except ConfigurationError:  # the whole chat is rendered: the turn forks
            return None
        return text if rendered.endswith(text) else None

    def parse(
        self, tokens: Sequence[int], tools: Sequence[JsonObject], call_prefix: str
    ) -> ParsedAnswer:
        ends = self.template.stop | self.tokenizer.ends
        written = list(tokens[:-1] if len(tokens) and tokens[-1] in ends else tokens)
        # Special tokens are read: calls of some models begin with them.
        text = self.tokenizer.light.decode(written, skip_special_tokens=False)
        is_read = bool(tools) or self.tool_format in OF_MESSAGES
        if not is_read:
            return ParsedAnswer(self.decode(tokens))
        parsed = parse_tool_calls(text, self.tool_format, tools, lambda at: f"{call_prefix}{at}")
        special = self.tokenizer.special_texts(written)
        return replace(
            parsed,
            content=_without(parsed.content, special),
            reasoning=_without(parsed.reasoning, special),
        )


def _within(text: str, before: str, after: str) -> str | None:
    is_around = bool(before or after) and text.startswith(before) and text.endswith(after)
    if not is_around or len(text) < len(before) + len(after):
        return None
    return text[len(before) : len(text) - len(after)]


def _without(text: str, names: Sequence[str]) -> str:
    for name in names:
        text = text.replace(name, "")
    return text


def chat_format(task: Task, tool_format: str = "auto", system: str = "") -> ChatFormat:
    """With `auto` the chat template decides the format of calls; `system` is the message that the
    task puts before its prompts.
    """
    tokenizer = task.tokenizer()
    sources = ChatTemplate(tokenizer).sources if isinstance(tokenizer, TextTokenizer) else ()
    if tool_format == "auto":
        tool_format = format_of_template("\n".join(sources))
    if isinstance(tokenizer, TextTokenizer) and sources:
        if tool_format == UNKNOWN:
            log.warning("%s; requests with tools are refused", unknown_format(tokenizer.where))
        return TemplateChat(tokenizer, tool_format, system=system)
    return PlainChat(tokenizer, tool_format)


def text_of(content: object) -> str:
    """Returns a message's text: `content` itself, or its parts joined; "" for None. Raises
    `ChatRefused`.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatRefused(f"content has the type {type(content).__name__}, not text or a list")
    try:
        return joined_parts(cast("list[object]", content))
    except ForeignValueRefused as error:
        raise ChatRefused(str(error)) from None
