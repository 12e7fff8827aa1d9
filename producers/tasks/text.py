"""Converts a task's texts to the tokens of a prompt, and an answer's tokens to text (`TaskText`).

A `TaskText` joins a tokenizer, its chat template, the system message and the limit of a prompt's
length. `load_task` makes one for a run, and passes it to a task's constructor if that has a
parameter `text`. The tokenizer's files are read on first use. So they are never read by a rollout,
which builds the task only to learn whether it is a dialogue.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Turns
from rollstream.producers.tasks.text_tokenizer import TextTokenizer

ChatMessage = Mapping[str, Any]
"""One message in the form of OpenAI's protocol: `role` (system, user, assistant, tool), `content`,
and `tool_calls` of an assistant.
"""
ToolSchema = Mapping[str, Any]
"""One tool in the form of OpenAI's protocol: `{"type": "function", "function": {…}}`."""
PromptContent = str | Sequence[ChatMessage]
"""The content of a prompt: one text, which is the user's message, or several chat messages."""

_MARK = "rollstream-answer"  # stands for an answer, to find the token that the template puts after


class TaskText:
    """The text format of a run's task. With the template `chat` a prompt is rendered by the
    tokenizer's chat template, after the message `system` unless that is empty; with `plain` it is
    the text alone, with the special tokens that the tokenizer puts around any text. A prompt fits
    if it has at most `prompt_tokens_max` tokens; None, in processes that make no prompts: no limit.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: Literal["chat", "plain"] = "chat",
        system: str = "",
        prompt_tokens_max: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_tokens_max = prompt_tokens_max
        self._template: Literal["chat", "plain"] = template
        self._system = system

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """Return the tokens that end an answer: the tokenizer's end tokens, and the token that the
        chat template puts after an answer. Raises `ConfigurationError` if there is none.
        """
        ends = set(self.tokenizer.ends)
        if self._template == "chat":
            ends |= set(self._turn_end)
        if not ends:
            raise ConfigurationError(
                f"{self.tokenizer.where} names no end token: set eos_token in its "
                "tokenizer_config.json"
            )
        return tuple(sorted(ends))

    def prompt(self, content: PromptContent, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Return the prompt's tokens, up to the place where the answer starts. Raises
        `ConfigurationError` if the chat template refuses the content, or if the template is `plain`
        and the content is chat messages or has tools.
        """
        if self._template == "plain":
            if not isinstance(content, str) or tools:
                raise ConfigurationError(
                    'chat messages need a chat template: set task.template = "chat", or give texts'
                )
            return tuple(self.tokenizer.light.encode(content).ids)
        rendered = self.render(self._messages(content), tools, True)
        return tuple(self.tokenizer.encode(rendered))

    def reply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the tokens of further messages, such as the results of tools, after an answer that
        ended in its stop token: from there to the place where the next answer starts. `calls` are
        the `tool_calls` of that answer. The tokens of the answer itself are never made again.
        """
        answer: dict[str, Any] = {"role": "assistant", "content": _MARK}
        if calls:
            answer["tool_calls"] = [dict(call) for call in calls]
        chat: list[ChatMessage] = [{"role": "user", "content": "?"}, answer]
        before = self.render(chat, tools, False)
        after = self.render([*chat, *messages], tools, True)
        if after.startswith(before):
            return tuple(self.tokenizer.encode(self._after_end(before) + after[len(before) :]))
        _, mark, rest = after.partition(_MARK)  # a template that changes earlier answers
        if not mark or calls:
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} renders an answer otherwise once "
                "messages follow it, so a dialogue cannot be continued by its tokens"
            )
        return tuple(self.tokenizer.encode(self._after_end(rest)))

    def _after_end(self, text: str) -> str:
        """Return the text behind the first token that ends a turn, after the mark."""
        name = self.tokenizer.light.id_to_token(self._turn_end[0]) if self._turn_end else ""
        rest = text.rpartition(_MARK)[2]
        return rest.partition(name)[2] if name and name in rest else rest

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the prompt leaves room in the context for an answer of `sampling.tokens_max`
        tokens.
        """
        return self.prompt_tokens_max is None or len(tokens) <= self.prompt_tokens_max

    def surely_fits(self, content: PromptContent, tools: Sequence[ToolSchema] = ()) -> bool:
        """Whether the prompt is so short that it fits whatever its tokens are; False if that is not
        certain. It is not tokenized: a text has at most one token per byte.
        """
        if self.prompt_tokens_max is None:
            return True
        if tools or (not isinstance(content, str) and any("tool_calls" in one for one in content)):
            return False
        contents = [content] if isinstance(content, str) else [m["content"] for m in content]
        size = sum(len(content.encode()) for content in (*contents, self._system))
        roles = 64 * (len(contents) + 2)  # 64 covers what a template adds to a message
        return size + roles <= self.prompt_tokens_max

    def answer(self, turns: Turns) -> str:
        """Return the text of the last turn, without its end token and other special tokens."""
        turn = turns[-1] if turns else ()
        if turn and turn[-1] in self.tokenizer.ends:
            turn = turn[:-1]
        return self.tokenizer.decode(turn)

    def written(self, turns: Turns) -> str:
        """Return the text of the last turn without its end token, but with other special tokens: in
        some models they begin the call of a tool.
        """
        turn = list(turns[-1]) if turns else []
        if turn and turn[-1] in self.stop:
            turn.pop()
        return self.tokenizer.light.decode(turn, skip_special_tokens=False)

    def response(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a whole answer, its end token included, as a warm-up document needs
        them.
        """
        ends = self._turn_end if self._template == "chat" else ()
        end = ends or tuple(sorted(self.tokenizer.ends))[:1]
        return (*self.tokenizer.encode(text), *end)

    def _messages(self, content: PromptContent) -> list[ChatMessage]:
        """Return chat messages, with the system message in front if they have none."""
        messages: list[ChatMessage] = (
            [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        )
        if self._system and not any(message["role"] == "system" for message in messages):
            return [{"role": "system", "content": self._system}, *messages]
        return messages

    @cached_property
    def _turn_end(self) -> tuple[int, ...]:
        """Return the special token that the chat template puts after an assistant's message, or
        nothing. In some models it differs from the token that ends a text.
        """
        whole = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        after = self.render(whole, (), False).rpartition(_MARK)[2]
        first = self.tokenizer.encode(after)[:1]
        added = self.tokenizer.light.get_added_tokens_decoder()
        return tuple(token for token in first if token in added and added[token].special)

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], is_asked: bool
    ) -> str:
        """Return the messages in the chat template's form; `is_asked`: with the beginning of the
        assistant's answer. Raises `ConfigurationError` if there is no template or it refuses them.
        """
        from jinja2 import TemplateError

        tokenizer = self.tokenizer.whole
        if tokenizer.chat_template is None:  # pyright: ignore[reportUnknownMemberType]
            raise ConfigurationError(
                f'task.template = "chat": {self.tokenizer.where} has no chat template; set '
                'task.template = "plain", or put a chat_template.jinja beside it'
            )
        try:
            rendered = tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                [dict(each) for each in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_asked,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} refuses: {error}"
            ) from error
        return cast(str, rendered)
