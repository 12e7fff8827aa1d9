"""What vLLM's worker guesses from in a process of its own: the node's history, mapped by name, and
what runs in this very engine.

The file is not kept from being removed: the rollout that this process belongs to does that, and
when it lets go the memory must not stay behind. What was mapped stays readable.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from producers.engines.drafts.history import History
from producers.engines.drafts.lookup import View, drafted
from producers.engines.drafts.memory import LENGTHS, Layout, own_memory
from producers.engines.drafts.segment import map_segment
from producers.engines.drafts.source import Draft
from streams.records import Tokens

RUNNING_LEAST, RUNNING_MOST = 1 << 10, 1 << 16  # tokens of what runs here
LOOK_EVERY = 256  # look-ups between two looks whether the file was replaced


class MappedHistory:
    """A draft source. Until there is a file of this name it knows what runs here alone."""

    context = LENGTHS[-1]

    def __init__(self, path: str, running_tokens: int) -> None:
        self.path = Path(path)
        self._running = History(max(RUNNING_LEAST, min(running_tokens, RUNNING_MOST)))
        self._mapped = View(own_memory(Layout(16)))
        self._inode: int | None = None
        self._asked = 0

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        if self._asked % LOOK_EVERY == 0:
            self._look()
        self._asked += 1
        return drafted((self._running.view, self._mapped), prompt, newest, most)

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """The engine generated the last `fresh` of these tokens."""
        self._running.grown(prompt, group, tokens, fresh)

    def _look(self) -> None:
        """Take up a file that is new under this name."""
        try:
            inode = os.stat(self.path).st_ino
        except OSError:
            return
        if inode == self._inode:
            return
        found = map_segment(self.path)
        if found is None:
            return
        if found.memory.layout.lengths == LENGTHS:  # else of another program
            self._inode, self._mapped = found.inode, View(found.memory)
        found.close()
