"""The draft source contract: an engine asks it for drafts, and passes the tokens it generates to
it.

The engine verifies every token of a draft, so a wrong, old or torn draft costs time and never
changes an output. Prompts are identified by their tokens, not by a request, so that an engine
without request ids can use the same calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.streams.values import Tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """`tokens` that may come next; `matched` of the newest tokens were found in the history (0:
    none, and then there are no `tokens`).
    """

    tokens: Sequence[int]
    matched: int


NO_DRAFT = Draft((), 0)


class DraftSource(Protocol):
    context: int
    """How many of the newest tokens a look-up uses, at most."""

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        ...

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens, which the engine generated after the others."""
        ...
