"""Decodes tokens to text with the run's `tokenizer.json`, without transformers or torch.

Without that file, token numbers are shown instead.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from rollstream.analysis.locate import RunLocation
from rollstream.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MACROS = """
CREATE MACRO prompt_of(tokens, sources) AS list_filter(tokens, lambda t, i: sources[i] = 0);
CREATE MACRO answer_of(tokens, sources) AS list_filter(tokens, lambda t, i: sources[i] = 1);
"""


class TokenText:
    """Decodes tokens; `is_known` is False without a tokenizer, when it returns numbers."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._path = next((path for path in paths if path.is_file()), None)

    @property
    def is_known(self) -> bool:
        return self._path is not None

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the tokens' text, special tokens included; numbers without a tokenizer."""
        if not len(tokens):
            return ""
        if self._path is None:
            return " ".join(str(token) for token in tokens)
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token; a partial character is shown as in the vocabulary."""
        if self._path is None:
            return [f"{token} " for token in tokens]
        known: dict[int, str] = {}
        for token in {int(t) for t in tokens}:
            piece = self._tokenizer.decode([token], skip_special_tokens=False)
            if not piece or "\ufffd" in piece:
                piece = self._tokenizer.id_to_token(token) or f"<{token}>"
            known[token] = piece
        return [known[int(token)] for token in tokens]

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        assert self._path is not None
        try:
            return Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigurationError(f"{self._path} is not a tokenizer: {error}") from error


def define_text(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """Defines SQL functions: `text_of(tokens)`, and the selections `prompt_of(tokens, sources)` and
    `answer_of(tokens, sources)` of a trajectory's tokens.
    """
    text = TokenText(location.tokenizers())

    def of(tokens: list[int] | None) -> str:
        return text.text(tokens or ())

    connection.create_function("text_of", of, ["UINTEGER[]"], "VARCHAR")  # pyright: ignore[reportArgumentType]
    connection.execute(MACROS)
