"""What an engine needs of speculative decoding: a source of drafts, and a gate that decides when
they pay. `producers/drafts/` has both; an engine that does not draft imports neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.streams.values import Tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds the `tokens` that may come next; they followed `matched` tokens in the history that
    equal the newest ones of the sequence. If `matched` is 0, there is no draft and `tokens` is
    empty.
    """

    tokens: Sequence[int]
    matched: int


NO_DRAFT = Draft((), 0)


class DraftSource(Protocol):
    """A history from which an engine gets drafts, and to which it passes the tokens that it
    generates.

    The engine verifies every token of a draft, so a wrong, old or half overwritten draft costs time
    and never changes an output. `prompt` is a hash of the prompt's tokens (`history.prompt_key`),
    not the id of a request, so that an engine without request ids can use the same calls.
    """

    context: int
    """How many of the newest tokens a look-up uses, at most."""

    def draft(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
        """Returns at most `tokens_max` tokens that may follow `newest` (oldest first)."""
        ...

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens of a running sequence; the tokens before them are
        their context. `group` orders the passes over this prompt.
        """
        ...


class DraftSwitch(Protocol):
    """Decides by measured times whether a batch drafts."""

    def decide(self, rows: int, now_s: float) -> bool:
        """Returns whether `rows` sequences draft from now on."""
        ...
