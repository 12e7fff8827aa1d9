"""The tokenizer of a task's texts: that of a model's folder, or the built-in one, one token per
byte.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.hf_folder import read_small_file
from rollstream.storage.model_folder.hf_tokenizer import (
    TOKENIZER,
    end_token,
    is_exact,
    load_tokenizer,
    read_fields,
)
from rollstream.streams.foreign_text import clean_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SPECIAL = (PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>")
"""The special tokens of the built-in tokenizer, in the order of their numbers."""
NAMES = {"pad_token": PAD, "bos_token": BEGIN, "eos_token": END}
"""The special tokens of the built-in tokenizer by their names in `tokenizer_config.json`."""

CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% set has_system = messages and messages[0]['role'] == 'system' %}"
    "{% if tools %}{{ '<|system|>' }}"
    "{% if has_system %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ 'Tools:\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    '{{ \'Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|end|>\' }}{% endif %}'
    "{% for message in messages %}{% set role = message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role ' + role + ' is not system, user, assistant or tool') }}"
    "{% endif %}"
    "{% if role == 'tool' %}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}"
    "{% elif not (tools and has_system and loop.first) %}"
    "{{ '<|' + role + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{% set called = call['function'] or call %}"
    "{{ '<tool_call>{\"name\": ' + (called['name'] | tojson) + ', \"arguments\": ' }}"
    "{% if called['arguments'] is string %}{{ called['arguments'] }}"
    "{% else %}{{ called['arguments'] | tojson }}{% endif %}{{ '}</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The built-in tokenizer's chat template: ChatML, but each role is one special token, which as text
would cost a token per letter.
"""


def byte_tokenizer() -> Tokenizer:
    """Returns the tokenizer: tokens 0 to 255 are the bytes, 256 to 261 the special tokens.
    `<|begin|>` comes before a text unless the caller passes `add_special_tokens=False`.
    """
    letters = _letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])  # pyright: ignore[reportUnknownMemberType]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, byte_token(BEGIN))]
    )
    return tokenizer


def byte_token(special: str) -> int:
    return 256 + SPECIAL.index(special)


def _letters() -> dict[int, str]:
    # GPT-2's table: each byte has a printable letter.
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }


class TextTokenizer:
    """The built-in tokenizer if `folder` is None. Without a readable `tokenizer.json` the first use
    raises `ConfigurationError`.

    `light`, of the library `tokenizers`, starts fast: it encodes and decodes, also in reward
    processes. `whole`, of transformers, applies chat templates, knows the special tokens by their
    roles, and writes the files.
    """

    template_values: Mapping[str, Any] = MappingProxyType({})
    """Values of the chat template's own variables (`task.template_values`)."""
    template_date = ""
    """The day that the chat template writes as the present one (`task.template_date`)."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @property
    def where(self) -> str:
        return (
            "the built-in tokenizer" if self.folder is None else f"the tokenizer in {self.folder}"
        )

    @cached_property
    def size(self) -> int:
        return max(self.light.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special(self) -> Mapping[str, int]:
        """The numbers of the special tokens, by their names in a model's configuration."""
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        numbers = {name: getattr(self.whole, name) for name in names}
        return {name: number for name, number in numbers.items() if number is not None}

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text, by the folder's files; empty if none of them names one."""
        if self.folder is None:
            return frozenset({byte_token(END)})
        end_name = end_token(self.folder)
        end_ids: list[object] = []
        if end_name is not None:
            end_ids.append(self.light.token_to_id(end_name))
        elif not is_exact(self.folder.expanduser()):
            end_ids.append(self.whole.eos_token_id)  # a class of transformers may name one
        for name in ("generation_config.json", "config.json"):
            numbers = read_fields(self.folder / name).get("eos_token_id")
            end_ids += numbers if isinstance(numbers, list) else [numbers]
        return frozenset(number for number in end_ids if isinstance(number, int))

    @cached_property
    def light(self) -> Tokenizer:
        if self.folder is None:
            return byte_tokenizer()
        path = _check_file(self.folder)
        try:
            tokenizer = Tokenizer.from_buffer(read_small_file(path))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        except ConfigurationError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{path} cannot be read as a tokenizer: {error}") from error
        if not is_exact(self.folder.expanduser()):
            # `tokenizer.json` alone does not give transformers' tokens.
            backend = self.whole.backend_tokenizer
            tokenizer = Tokenizer.from_str(backend.to_str())  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            tokenizer.encode_special_tokens = backend.encode_special_tokens
        # transformers encodes a text whole, whatever the file states for batches.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def whole(self) -> "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        if self.folder is None:
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **NAMES)
            tokenizer.chat_template = CHAT_TEMPLATE
            return tokenizer
        _check_file(self.folder)
        return load_tokenizer(self.folder)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of the text alone; names of special tokens inside the text become
        these tokens.
        """
        return self.light.encode(clean_text(text), add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text without special tokens. Bytes that are not UTF-8 become replacement
        characters.
        """
        return self.light.decode(list(tokens), skip_special_tokens=True)

    def special_texts(self, tokens: Sequence[int]) -> list[str]:
        added = self.light.get_added_tokens_decoder()
        numbers = dict.fromkeys(token for token in tokens if token in added)
        return [added[token].content for token in numbers if added[token].special]

    def save(self, folder: Path) -> None:
        self.whole.save_pretrained(str(folder))  # pyright: ignore[reportUnknownMemberType]


def _check_file(folder: Path) -> Path:
    path = folder.expanduser() / TOKENIZER
    if not path.is_file():
        raise ConfigurationError(
            f"{folder} has no {TOKENIZER}, which a task of text needs: copy the model's "
            "tokenizer files there, or set task.tokenizer to a folder that has them "
            "(save_pretrained of a transformers tokenizer writes it)"
        )
    return path
