"""The draft source of a rollout's engine: the history of its node, and the sequences that run in
this engine (Seer's siblings), which other processes get later or never.

If both match equally many tokens, the running sequences are used: they come from the newest
weights. They are kept in a small separate history, where they are soon overwritten.
"""

from collections.abc import Sequence

from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.source import look_up_draft
from rollstream.producers.drafts.node import NodeHistory
from rollstream.producers.drafts.shared import SharedHistory
from rollstream.producers.drafts.source_part import Draft
from rollstream.streams.values import Tokens

RUNNING_TOKENS_MIN = 1024


class CombinedSource:
    """A draft source over two histories of the same n-gram lengths."""

    def __init__(self, node: NodeHistory | SharedHistory, running: AnswerHistory) -> None:
        self.node, self._running = node, running
        self.context = running.context

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        return look_up_draft((self._running.view, self.node.view()), prompt, newest, most)

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens, which the engine generated, to the running
        history.
        """
        self._running.grown(prompt, group, tokens, fresh)


def running_tokens(slots: int, context_max: int, tokens_max: int) -> int:
    """Tokens of the history of running sequences: those of a full batch, or a quarter of the node's
    history if that is less.
    """
    return max(RUNNING_TOKENS_MIN, min(slots * context_max, tokens_max // 4))
