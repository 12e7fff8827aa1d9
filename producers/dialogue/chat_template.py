"""Renders chats by a tokenizer's chat template, and continues a dialogue by its tokens. An answer's
tokens are never made again: the chat is rendered with a mark in its place, and the text behind it
is inserted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any, cast

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.template_bounds import render_bounded
from rollstream.producers.dialogue.template_messages import (
    ARGUMENT,
    CALL_FORMS,
    MARK,
    QUESTION,
    SAMPLE_CALL,
    SAMPLE_TOOL,
    TOOL_NAME,
    CallForm,
    ChatMessage,
    ToolSchema,
    marked,
)
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.streams.foreign_text import clean_text, reason_text

_PART_OF_CALL = re.compile(r"tool.?calls?\b|tool.?calls?[_▁]|function|invoke", re.IGNORECASE)
"""Names of special tokens inside of an answer: they end a call, not the answer."""
_OPENED = ("<think>", "[THINK]", "<|START_THINKING|>")
"""Texts that begin a thought; a template may write them at the end of a prompt."""
_DATE = "strftime_now"  # transformers' function of templates for the present day
_DIRECTIVES = (*"aAbBdmyYHIMSpjF", "-d", "-m")
_DATE_MACRO = (
    "{%- macro strftime_now(form) -%}{%- for part in form.split('%') -%}"
    "{%- if loop.first -%}{{- part -}}"
    "{%- elif part[:2] in rollstream_day -%}{{- rollstream_day[part[:2]] ~ part[2:] -}}"
    "{%- else -%}{{- rollstream_day[part[:1]] ~ part[1:] -}}{%- endif -%}"
    "{%- endfor -%}{%- endmacro -%}"
)
_GIVEN = (
    "messages", "conversation", "tools", "xml_tools", "documents", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length",
    "tokenizer_kwargs", "sanitize_control_tokens", "strftime_now", "bos_token", "eos_token",
)  # fmt: skip
"""Variables of templates, and parameters of transformers, that are not the user's."""
_SAMPLE_TEXT = "rollstream-message"
_XML_TOOLS = "xml_tools"  # SmolLM3's name for `tools`


@dataclass(slots=True)
class _TurnEnds:
    """Special tokens. `closing` ones end an answer; `opening` ones begin the message behind an
    answer without an end; `earlier` ones stand behind answers once messages follow: gpt-oss ends
    each part so, hence they stop none. `last` ends a chat's last answer.
    """

    closing: set[str] = field(default_factory=set[str])
    opening: set[str] = field(default_factory=set[str])
    earlier: set[str] = field(default_factory=set[str])
    last: str = ""


class ChatTemplate:
    """A tokenizer's chat template with the run's values of its variables."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._shown: dict[tuple[str, str], bool] = {}

    @cached_property
    def sources(self) -> tuple[str, ...]:
        template = cast(object, self.tokenizer.whole.chat_template)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(template, Mapping):
            return tuple(str(each) for each in cast(Mapping[str, object], template).values())
        return (str(template),) if template else ()

    # ---- rendering -------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], is_asked: bool
    ) -> str:
        """Returns the messages in the template's form, with `is_asked` up to the begin of the
        answer. Raises `ConfigurationError` if there is no template, if it refuses or passes its
        bounds (`render_bounded`), or if it lacks a variable of `task.template_values`.
        """
        has_calls = any(message.get("tool_calls") for message in messages)
        form = (self._form if has_calls else None) or CallForm()
        return self._render([form.message(message) for message in messages], tools, is_asked)

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], is_asked: bool
    ) -> str:
        self._check_template()
        tokenizer, values = self.tokenizer.whole, dict(self._values)
        if self._dated:
            source = cast(str, tokenizer.get_chat_template(None, list(tools) or None))  # pyright: ignore
            values["chat_template"] = self._dated + source
        if tools and any(_XML_TOOLS in source for source in self.sources):
            values[_XML_TOOLS] = list(tools)
        try:
            rendered = render_bounded(
                lambda: cast(
                    str,
                    tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                        [dict(each) for each in messages],
                        tools=[dict(tool) for tool in tools] or None,
                        tokenize=False,
                        add_generation_prompt=is_asked,
                        **values,
                    ),
                ),
                self.sources,
            )
        except Exception as error:  # the model's own program, in any way that it can fail
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} refuses: {reason_text(error)}"
            ) from error
        return clean_text(str(rendered))

    def _check_template(self) -> None:
        if not self.sources:
            raise ConfigurationError(
                f'task.template = "chat": {self.tokenizer.where} has no chat template; set '
                'task.template = "plain", or put a chat_template.jinja beside it'
            )

    @cached_property
    def _values(self) -> dict[str, Any]:
        values = dict(self.tokenizer.template_values)
        for name in values:
            if name in _GIVEN or name.startswith("return_"):
                raise ConfigurationError(
                    f"task.template_values: {name!r} is given by the run itself: remove it"
                )
            if not any(re.search(rf"\b{re.escape(name)}\b", source) for source in self.sources):
                raise ConfigurationError(
                    f"task.template_values: the chat template of {self.tokenizer.where} has no "
                    f"variable {name!r}"
                )
        return values

    @cached_property
    def _dated(self) -> str:
        # Prompts are equal on every day: the run's day replaces transformers' function for the
        # present one. By a macro, because transformers gives no values to a template that can be
        # called.
        day_text = self.tokenizer.template_date
        if not day_text or not any(_DATE in source for source in self.sources):
            return ""
        day = date.fromisoformat(day_text)
        moment = datetime(day.year, day.month, day.day, tzinfo=UTC)
        parts = {letter: moment.strftime(f"%{letter}") for letter in _DIRECTIVES}
        return f"{{%- set rollstream_day = {json.dumps(parts)} -%}}{_DATE_MACRO}"

    @cached_property
    def _form(self) -> CallForm | None:
        call = marked((SAMPLE_CALL,), MARK)
        for form in CALL_FORMS:
            for tools in ((), (SAMPLE_TOOL,)):
                try:
                    shown = self._render([QUESTION, form.message(call)], tools, False)
                except ConfigurationError:
                    continue
                before, mark, _ = shown.rpartition(MARK)
                # Python's form of an object, or JSON inside of JSON
                is_wrong = before.endswith((f"{{'{ARGUMENT}': '", '\\"'))
                if mark and not is_wrong and TOOL_NAME in before:
                    return form
        return None

    @property
    def shows_calls(self) -> bool:
        return self._form is not None

    # ---- continuing ------------------------------------------------------------------------------

    def continuation(
        self,
        before: Sequence[ChatMessage],
        calls: Sequence[Mapping[str, Any]],
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        last: int | None = None,
        has_ended: bool = True,
    ) -> str:
        """Returns the text of `messages` behind an answer with these `calls`, from its last token
        (`last`; None: the template's end) to the begin of the next answer. `has_ended` is False if
        the answer was cut off. Raises `ConfigurationError` if the template refuses the messages or
        leaves them or the calls out.
        """
        for message in messages:
            self._check_shown(str(message.get("role")), bool(calls))
        refusals: list[ConfigurationError] = []
        # Some templates take one call per answer, where a model may write several; others print
        # calls as the content alone.
        for shown in dict.fromkeys((len(calls), min(1, len(calls)), 0)):
            try:
                calls_shown = calls[len(calls) - shown :]
                tail = self._around(before, calls_shown, messages, tools, True)[1]
            except ConfigurationError as error:
                refusals.append(error)
                continue
            return self._after_end(tail, last, has_ended)
        raise refusals[0]

    def _around(
        self,
        before: Sequence[ChatMessage],
        calls: Sequence[Mapping[str, Any]],
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        is_asked: bool,
    ) -> tuple[str, str]:
        """Returns the texts before and behind the answer's content, or its last call's
        arguments.
        """
        texts = json.dumps([*before, *messages, *calls], ensure_ascii=False, default=str)
        # No text of the chat may contain the mark.
        mark = MARK
        while mark in texts:
            mark += "-"
        chat = [*before, marked(calls, mark), *messages]
        head, shown, tail = self.render(chat, tools, is_asked).rpartition(mark)
        if not shown:
            left_out = "the calls of an answer" if calls else "an answer"
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} leaves out {left_out} once messages "
                "follow, so a dialogue cannot be continued by its tokens"
            )
        return head, tail

    def _check_shown(self, role: str, is_result: bool) -> None:
        calls = (SAMPLE_CALL,) if is_result else ()
        message = {"role": role, "content": _SAMPLE_TEXT, "name": TOOL_NAME}
        if role == "tool":
            message["tool_call_id"] = "call_0"
        chat = [QUESTION, marked(calls, MARK), message]
        if not self._shows_sample((role, "result" if is_result else "answer"), chat):
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} leaves out messages of the role "
                f"{role}, so a dialogue cannot be continued with them"
            )

    def with_own_roles(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        # OpenAI's newer name of `system` is `developer`.
        if any("developer" in source for source in self.sources):
            return list(messages)
        return [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in messages
        ]

    def refuse_left_out(self, role: str, is_first: bool) -> None:
        """Raises `ConfigurationError` if the template leaves out messages of this role."""
        if role in ("user", "assistant", "tool"):
            return
        message = {"role": role, "content": _SAMPLE_TEXT}
        chat = [message, QUESTION] if is_first else [QUESTION, message]
        if not self._shows_sample((role, "first" if is_first else "later"), chat):
            later = "" if is_first else " behind the first message"
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} leaves out messages of the role "
                f"{role!r}{later}, so the model would not see them"
            )

    def _shows_sample(self, place: tuple[str, str], chat: Sequence[ChatMessage]) -> bool:
        if place not in self._shown:
            try:
                self._shown[place] = _SAMPLE_TEXT in self.render(chat, (), True)
            except ConfigurationError:
                # A refused sample counts as shown: the messages themselves are refused, with the
                # reason.
                self._shown[place] = True
        return self._shown[place]

    def _after_end(self, tail: str, last: int | None, has_ended: bool) -> str:
        name = "" if last is None else self.tokenizer.light.id_to_token(last) or ""
        closing = self._ends.closing | self._ends.earlier
        names = sorted(closing | self._ends.opening, key=len, reverse=True)
        if not names:
            return tail
        pattern = re.compile("|".join(re.escape(each) for each in names))
        end = pattern.search(tail)
        if end is None:
            return tail
        if end[0] in self._ends.opening:  # the next message's first token ends the answer
            is_sampled = has_ended and (last is None or name == end[0])
            return tail[end.end() if is_sampled else end.start() :]
        if not has_ended:
            return tail[end.start() :]
        # A template may end an answer by several tokens; the model sampled one of them.
        ends = [end]
        while (end := pattern.match(tail, end.end())) and end[0] in closing:
            ends.append(end)
        if last is None:
            return tail[ends[0].end() :]
        sampled = next((each for each in ends if each[0] == name), ends[-1])
        return tail[sampled.end() :]

    @property
    def stop(self) -> frozenset[int]:
        """The special tokens after which an answer ends, with or without calls."""
        names = self._ends.closing | self._ends.opening
        tokens = (self.tokenizer.light.token_to_id(name) for name in names)
        return frozenset(token for token in tokens if token is not None)

    @property
    def last_token(self) -> int | None:
        """The token of `last_text`; None if there is none."""
        return self.tokenizer.light.token_to_id(self.last_text) if self.last_text else None

    @property
    def last_text(self) -> str:
        """The special token behind a chat's last answer, which may differ from a text's; "" without
        one.
        """
        return self._ends.last

    @cached_property
    def _ends(self) -> _TurnEnds:
        self._check_template()
        ends = _TurnEnds()
        result = {"role": "tool", "tool_call_id": "call_0", "name": TOOL_NAME, "content": "?"}
        for calls, message in (((), QUESTION), ((SAMPLE_CALL,), result)):
            try:
                prompt = self.render([QUESTION], (), True)
                head, last = self._around([QUESTION], calls, (), (), False)
                _, following = self._around([QUESTION], calls, [message], (), True)
            except ConfigurationError:  # a template without tools, or one that wants other chats
                continue
            inner = self._special(head[len(prompt) :] if head.startswith(prompt) else "")
            self._add_ends(ends, last, following, inner if calls else None)
        return ends

    def _add_ends(
        self, ends: _TurnEnds, last: str, following: str, inner: Sequence[str] | None
    ) -> None:
        # `inner` are special tokens inside of calls, which end no answer; None: the answer has no
        # calls.
        is_text, inner = inner is None, inner or ()
        first = [name for name in self._special(last) if name not in inner]
        then = [name for name in self._special(following) if name not in inner]
        if is_text:
            ends.last = first[0] if first else ""
        length = next(
            (at for at, (a, b) in enumerate(zip(last, following, strict=False)) if a != b),
            min(len(last), len(following)),
        )
        if common := [name for name in self._special(last[:length]) if name not in inner]:
            ends.closing.update(common)
        elif first:  # another token ends an answer once a message follows
            ends.closing.update(first[:1])
            ends.earlier.update(then[:1])
        else:
            ends.opening.update(then[:1])

    def _special(self, text: str) -> list[str]:
        pattern = self._special_pattern
        names = pattern.findall(text) if pattern else []
        # Parts of calls end no answer.
        return [name for name in names if not _PART_OF_CALL.search(name)]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        tokens = self.tokenizer.light.get_added_tokens_decoder()
        names = {
            token.content
            for number, token in tokens.items()
            if token.special or number in self.tokenizer.ends
        }
        texts = sorted((name for name in names if name), key=len, reverse=True)
        return re.compile("|".join(re.escape(text) for text in texts)) if texts else None

    @cached_property
    def opened(self) -> str:
        """The thought with which the template begins every answer, such as `<think>`: part of the
        prompt.
        """
        tail = self._render([{"role": "user", "content": MARK}], (), True).rpartition(MARK)[2]
        starts = [at for sign in _OPENED if (at := tail.rfind(sign)) >= 0]
        return tail[min(starts) :] if starts else ""
