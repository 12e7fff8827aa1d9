"""Trains a byte-pair tokenizer on a task's texts, for models from scratch; equal texts give an
equal one. The warm-up saves it into the model's folder.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollstream.producers.dialogue.text_tokenizer import (
    CHAT_TEMPLATE,
    END,
    NAMES,
    SPECIAL,
    TextTokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECES = r"\p{N}+|[^\s\p{N}]+\s?|\s+"
"""Tokens do not cross the borders of these pieces."""


class TrainedTokenizer(TextTokenizer):
    """At most `size` tokens, trained on `texts()` at first use. It encodes every text, and has the
    built-in chat template.
    """

    def __init__(self, texts: Callable[[], Iterable[str]], size: int) -> None:
        assert size >= 256 + len(SPECIAL), "the vocabulary holds all bytes and special tokens"
        super().__init__(None)
        self._texts, self._size = texts, size

    @property
    def where(self) -> str:
        return "the tokenizer that the warm-up trains"

    @cached_property
    def ends(self) -> frozenset[int]:
        return frozenset({SPECIAL.index(END)})

    @cached_property
    def light(self) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [
                pre_tokenizers.Split(Regex(PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(
            vocab_size=self._size,
            special_tokens=[AddedToken(name, normalized=False) for name in SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        # A list: texts that train a tokenizer of their own would wait for this training's threads.
        tokenizer.train_from_iterator(list(self._texts()), trainer)  # pyright: ignore[reportUnknownMemberType]
        return tokenizer

    @cached_property
    def whole(self) -> "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.light, **NAMES)
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer
