"""What a rollout's engine drafts from: the history of its node, and what runs in this very engine
(Seer's siblings), which others hear of later or never.

Where both recognise as much, what runs here comes first: it is of the newest weights. It lies in a
small history of its own, in which nothing stays for long.
"""

from collections.abc import Sequence

from producers.engines.drafts.history import History
from producers.engines.drafts.lookup import drafted
from producers.engines.drafts.node import NodeHistory
from producers.engines.drafts.shared import SharedHistory
from producers.engines.drafts.source import Draft
from streams.records import Tokens

RUNNING_LEAST = 1024


class WithRunning:
    """A draft source over two views of the same lengths."""

    def __init__(self, node: NodeHistory | SharedHistory, running: History) -> None:
        self.node, self._running = node, running
        self.context = running.context

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        return drafted((self._running.view, self.node.view()), prompt, newest, most)

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """The engine generated the last `fresh` of these tokens."""
        self._running.grown(prompt, group, tokens, fresh)


def running_tokens(slots: int, context_max: int, tokens_max: int) -> int:
    """How much to remember of what runs: all of a full batch, or a quarter of the node's history if
    that is less.
    """
    return max(RUNNING_LEAST, min(slots * context_max, tokens_max // 4))
