"""What an engine asks of whatever guesses the next tokens, and what it tells it in return.

A draft is a guess: the engine verifies every token of it, so a wrong, old or torn one costs time
and never changes an output. Prompts are named by their tokens, not by a request, so that an engine
without request ids asks the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streams.records import Tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """`tokens` that may come next; `matched` is how many of the newest tokens were recognised (0:
    none, then nothing is guessed).
    """

    tokens: Sequence[int]
    matched: int


NOTHING = Draft((), 0)


class DraftSource(Protocol):
    context: int
    """Newest tokens that a draft looks at, at most."""

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        ...

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """The engine generated the last `fresh` of these tokens; the others came just before."""
        ...
