"""The node's history as a reader: opened by name, read without locks.

`SharedHistory(path).draft(prompt_key(tokens, sources), newest, most)` works as `History.draft`. It
needs neither torch nor a log, so an engine's own processes can use it. While there is no segment of
that name it returns no drafts; a segment that replaces another is picked up without a call.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from rollstream.producers.drafts.source import HistoryView, look_up_draft
from rollstream.producers.drafts.memory import NGRAM_LENGTHS, HistoryLayout, allocate_memory
from rollstream.producers.drafts.shared_memory import HistorySegment, map_segment
from rollstream.producers.drafts.source_part import Draft
from rollstream.streams.values import Tokens

REFRESH_EVERY_LOOKUPS = 256  # look-ups between two checks whether the file was replaced, 1 µs each


class SharedHistory:
    """A draft source. `path` is the segment's file (`NodeHistory.path`). Rollouts hold the file;
    the process of an engine, which ends with its rollout, does not have to.
    """

    context = NGRAM_LENGTHS[-1]

    def __init__(self, path: str | Path, holds: bool = False) -> None:
        self.path, self._holds = Path(path), holds
        self._nothing = HistoryView(allocate_memory(HistoryLayout(16)))
        self._view = self._nothing
        self._segment: HistorySegment | None = None
        self._asked = 0

    @property
    def attached(self) -> bool:
        """Whether a segment is mapped."""
        return self._segment is not None

    def view(self) -> HistoryView:
        """The view for look-ups now (`lookup.drafted`)."""
        if self._asked % REFRESH_EVERY_LOOKUPS == 0:
            self.refresh()
        self._asked += 1
        return self._view

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        return look_up_draft((self.view(),), prompt, newest, most)

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Does nothing: running sequences are not part of the node's history (see
        `WithRunning`).
        """

    def refresh(self) -> None:
        """Map a segment that is new under this name and has a writer; the present one stays mapped
        while there is no other.
        """
        try:
            inode = os.stat(self.path).st_ino
        except OSError:
            return
        if self._segment is not None and self._segment.inode == inode:
            return
        found = map_segment(self.path, holds=self._holds)
        if found is None:
            return
        if found.memory.layout.lengths != NGRAM_LENGTHS:  # written by another release
            found.close()
            return
        self.close()
        self._segment, self._view = found, HistoryView(found.memory)

    def close(self) -> None:
        """Unmap the segment; look-ups find nothing until `view` maps one again."""
        if self._segment is not None:
            self._segment.close()
        self._segment, self._view = None, self._nothing
