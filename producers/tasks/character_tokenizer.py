"""Converts each character to one token, in pure Python and as Hugging Face tokenizer files.

Both give the same numbers. The run's own loops use the Python code, which needs neither
`tokenizers` nor `transformers`; other tools load the files from the model folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


class CharacterTokenizer:
    """One token per character of `characters`, after the four special ones; other characters become
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
        """Return the numbers of the characters alone; the caller adds the `BOS` of a prompt."""
        return [self._numbers.get(character, UNKNOWN) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without special tokens and without numbers outside the vocabulary."""
        pieces = self._pieces
        return "".join([pieces[token] for token in tokens if UNKNOWN < token < len(pieces)])

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`; transformers adds `<bos>` when it
        encodes.
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
