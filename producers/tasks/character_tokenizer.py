"""One token a character, in pure Python, and by Hugging Face files with the same ids (`save`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
"""Ids of the special tokens; the characters have the ids after them."""
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


class CharacterTokenizer:
    """Ids in the order of `characters`, after the special tokens; any other character becomes
    `<unk>`.
    """

    def __init__(self, characters: str) -> None:
        assert len(set(characters)) == len(characters), "a character may appear once only"
        self._pieces = (*SPECIAL, *characters)
        self._numbers = {piece: number for number, piece in enumerate(self._pieces)}

    @property
    def size(self) -> int:
        return len(self._pieces)

    @property
    def special(self) -> Mapping[str, int]:
        return {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

    def encode(self, text: str) -> list[int]:
        """Returns one id per character; the caller adds the `BOS` with which a prompt begins."""
        return [self._numbers.get(character, UNKNOWN) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = self._pieces
        return "".join([pieces[token] for token in tokens if UNKNOWN < token < len(pieces)])

    def save(self, folder: Path) -> None:
        """Writes files; a tokenizer loaded from them puts `<bos>` before a text by default, unlike
        `encode`.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer(models.WordLevel(self._numbers, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
        inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
        inner.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
        names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        outer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **names)
        outer.save_pretrained(str(folder))  # pyright: ignore[reportUnknownMemberType]
