"""Converts a task's texts to tokens and back. The tokenizer's files are read on first use, so never
by a rollout, which builds the task only to learn whether it is a dialogue.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.chat_template import ChatTemplate
from rollstream.producers.dialogue.template_messages import MARK, ChatMessage, ToolSchema
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.base import Turns

PromptContent = str | Sequence[ChatMessage]
"""The user's message, or several chat messages."""


VerifierText = Literal["plain", "special", "opened"]


class TaskText:
    """With the template `chat` a prompt is rendered after the message `system` unless that is
    empty; with `plain` it is the text, with the tokenizer's special tokens around it. A prompt has
    at most `prompt_tokens_max` tokens; None: no limit.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: Literal["chat", "plain"] = "chat",
        system: str = "",
        prompt_tokens_max: int | None = None,
        verifier_text: VerifierText = "plain",
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatTemplate(tokenizer)
        self._verifier_text: VerifierText = verifier_text
        self.prompt_tokens_max = prompt_tokens_max
        self.environment: tuple[str, ...] = ()  # names of variables that programs of the task get
        self.options_where = "task.options"  # the table of the task's options, for messages
        self._template: Literal["chat", "plain"] = template
        self._system = system
        self._frames: dict[tuple[str, ...] | None, int] = {}

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """Returns the tokenizer's end tokens, and those of the chat template. Raises
        `ConfigurationError` without any.
        """
        ends = set(self.tokenizer.ends)
        if self._template == "chat":
            ends |= self.chat.stop
        if not ends:
            raise ConfigurationError(
                f"{self.tokenizer.where} names no end token: set eos_token in its "
                "tokenizer_config.json"
            )
        return tuple(sorted(ends))

    def prompt(self, content: PromptContent, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Raises `ConfigurationError` if the chat template refuses the content or leaves out
        messages, or is `plain` and the content has messages or tools.
        """
        if self._template == "plain":
            if not isinstance(content, str) or tools:
                raise ConfigurationError(
                    'chat messages need a chat template: set task.template = "chat", or give texts'
                )
            return tuple(self.tokenizer.light.encode(content).ids)
        messages = self._messages(content)
        for place, message in enumerate(messages):
            self.chat.refuse_left_out(str(message.get("role")), is_first=not place)
        rendered = self.render(messages, tools, True)
        return tuple(self.tokenizer.encode(rendered))

    def reply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        calls: Sequence[Mapping[str, Any]] = (),
        turns: Turns = (),
    ) -> tuple[int, ...]:
        """Returns the tokens of further messages, from the stop token of an answer to the begin of
        the next. `calls` are the `tool_calls` of that answer, with which `turns` ends.
        """
        # Models with several stop tokens need the one that the answer has.
        last = turns[-1][-1] if turns and len(turns[-1]) else None
        before: list[ChatMessage] = [{"role": "user", "content": "?"}]
        text = self.chat.continuation(before, calls, messages, tools, last)
        return tuple(self.tokenizer.encode(text))

    def length_fault(self, tokens: Sequence[int]) -> str:
        """Returns "" if the prompt can be asked: it has tokens, and leaves room in the context for
        an answer of `sampling.tokens_max`.
        """
        if not tokens:
            return "the prompt has no tokens"
        if self.prompt_tokens_max is None or len(tokens) <= self.prompt_tokens_max:
            return ""
        return (
            f"{len(tokens)} tokens are more than the {self.prompt_tokens_max} that "
            "rollouts.context_max − sampling.tokens_max leaves for a prompt"
        )

    def likely_tokens_max(self, content: PromptContent) -> int | None:
        """Returns a number that the prompt most likely stays below; None if there is none, as with
        calls of tools.
        """
        if self._template == "plain":
            return self._frame(None) + len(content.encode()) if isinstance(content, str) else None
        messages = self._messages(content)
        if any(message.keys() - {"role", "content"} for message in messages):
            return None
        # A text has at most one token per byte; the template's part is rendered once for these
        # roles.
        size = sum(len(message["content"].encode()) for message in messages)
        return self._frame(tuple(message["role"] for message in messages)) + size

    def _frame(self, roles: tuple[str, ...] | None) -> int:
        if roles not in self._frames:
            # The template `plain` has no roles.
            if roles is None:
                tokens = tuple(self.tokenizer.light.encode(MARK).ids)
            else:
                marked = [{"role": role, "content": MARK} for role in roles]
                tokens = tuple(self.tokenizer.encode(self.render(marked, (), True)))
            self._frames[roles] = len(tokens)
        return self._frames[roles]

    def answer(self, turns: Turns) -> str:
        """Returns the last turn without its end token, as `task.verifier_text` has it: without
        other special tokens (`plain`), with them (`special`), or with them behind the thought that
        the prompt opened (`opened`).
        """
        if self._verifier_text != "plain":
            is_opened = self._verifier_text == "opened" and self._template == "chat"
            return (self.chat.opened if is_opened else "") + self.written(turns)
        turn = turns[-1] if turns else ()
        if turn and turn[-1] in self.tokenizer.ends:
            turn = turn[:-1]
        return self.tokenizer.decode(turn)

    def written(self, turns: Turns) -> str:
        """Returns the last turn without its end token, but with other special tokens: in some
        models they begin a call.
        """
        turn = list(turns[-1]) if turns else []
        if turn and turn[-1] in self.stop:
            turn.pop()
        return self.tokenizer.light.decode(turn, skip_special_tokens=False)

    def response(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a whole answer, its end token included, for a warm-up document."""
        last = self.chat.last_token if self._template == "chat" else None
        end = tuple(sorted(self.tokenizer.ends))[:1] if last is None else (last,)
        return (*self.tokenizer.encode(text), *end)

    def _messages(self, content: PromptContent) -> list[ChatMessage]:
        messages: list[ChatMessage] = (
            [{"role": "user", "content": content}]
            if isinstance(content, str)
            else self.chat.with_own_roles(content)
        )
        if self._system and not any(message["role"] == "system" for message in messages):
            return [{"role": "system", "content": self._system}, *messages]
        return messages

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], is_asked: bool
    ) -> str:
        return self.chat.render(messages, tools, is_asked)
