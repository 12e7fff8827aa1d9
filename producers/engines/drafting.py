"""What an engine needs of speculative decoding: a source of drafts, and a gate that decides when
they pay. `producers/drafts/` has both; an engine that does not draft imports neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.streams.values import Tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """The `tokens` that may come next, after a match of `matched` tokens; if that is 0, there is no
    draft.
    """

    tokens: Sequence[int]
    matched: int


NO_DRAFT = Draft((), 0)


class DraftSource(Protocol):
    """The engine verifies every token of a draft, so a wrong, old or half overwritten draft never
    changes an output. `prompt` is `history.prompt_key`.
    """

    context: int
    """How many of the newest tokens a look-up uses, at most."""

    def draft(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
        """Returns at most `tokens_max` tokens that may follow `newest` (oldest first)."""
        ...

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens of a running sequence; `group` orders the passes
        over this prompt.
        """
        ...


class DraftSwitch(Protocol):
    def decide(self, rows: int, now_s: float) -> bool: ...
