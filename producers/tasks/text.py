"""Converts text to a prompt's tokens, and an answer's tokens to text: tokenizer, chat template,
length limit.

Each task has one; a builder with a parameter `text` gets it. Files are read on first use, so a
rollout, which only checks the kind of its task, loads no tokenizer.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, cast

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Turns
from rollstream.producers.tasks.text_tokenizer import TextTokenizer

ChatMessage = Mapping[str, str]
"""`role` and `content`."""
PromptContent = str | Sequence[ChatMessage]
"""A prompt's content: a text, which is the user's only message, or chat messages."""

_MARK = "rollstream-answer"


class TaskText:
    """The text format of one task. `prompt_tokens_max` is None where no prompt is made."""

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
        """Tokens that end an answer: the tokenizer's end tokens, and the template's token after an
        answer.
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

    def prompt(self, content: PromptContent) -> tuple[int, ...]:
        """Tokens up to the start of the answer. Raises `ConfigurationError` if the template
        refuses.
        """
        if self._template == "plain":
            if not isinstance(content, str):
                raise ConfigurationError(
                    'chat messages need a chat template: set task.template = "chat", or give texts'
                )
            return tuple(self.tokenizer.light.encode(content).ids)
        return tuple(self.tokenizer.encode(self._render(self._messages(content), True)))

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the prompt leaves room for an answer of `sampling.tokens_max`."""
        return self.prompt_tokens_max is None or len(tokens) <= self.prompt_tokens_max

    def surely_fits(self, content: PromptContent) -> bool:
        """Whether the prompt fits in any case, without tokenizing it: a token is at least one byte
        of text.
        """
        if self.prompt_tokens_max is None:
            return True
        contents = [content] if isinstance(content, str) else [one["content"] for one in content]
        size = sum(len(content.encode()) for content in (*contents, self._system))
        roles = 64 * (len(contents) + 2)  # 64 covers a role's tokens
        return size + roles <= self.prompt_tokens_max

    def answer(self, turns: Turns) -> str:
        """Text of the last turn, without its end token."""
        turn = turns[-1] if turns else ()
        if turn and turn[-1] in self.tokenizer.ends:
            turn = turn[:-1]
        return self.tokenizer.decode(turn)

    def response(self, text: str) -> tuple[int, ...]:
        """A whole answer in the form that the model should give, for warm-up documents."""
        ends = self._turn_end if self._template == "chat" else ()
        end = ends or tuple(sorted(self.tokenizer.ends))[:1]
        return (*self.tokenizer.encode(text), *end)

    def _messages(self, content: PromptContent) -> list[ChatMessage]:
        messages: list[ChatMessage] = (
            [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        )
        if self._system and not any(one["role"] == "system" for one in messages):
            return [{"role": "system", "content": self._system}, *messages]
        return messages

    @cached_property
    def _turn_end(self) -> tuple[int, ...]:
        """The special token after an assistant's message. Some models end turns with another token
        than texts.
        """
        whole = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        after = self._render(whole, False).rpartition(_MARK)[2]
        first = self.tokenizer.encode(after)[:1]
        added = self.tokenizer.light.get_added_tokens_decoder()
        return tuple(token for token in first if token in added and added[token].special)

    def _render(self, messages: Sequence[ChatMessage], is_asked: bool) -> str:
        from jinja2 import TemplateError

        tokenizer = self.tokenizer.whole
        if tokenizer.chat_template is None:  # pyright: ignore[reportUnknownMemberType]
            raise ConfigurationError(
                f'task.template = "chat": {self.tokenizer.where} has no chat template; set '
                'task.template = "plain", or put a chat_template.jinja beside it'
            )
        try:
            rendered = tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                [dict(one) for one in messages], tokenize=False, add_generation_prompt=is_asked
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.where} refuses: {error}"
            ) from error
        return cast(str, rendered)
