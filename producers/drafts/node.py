"""Shares one history among all rollouts of a node: all draft from it, and one of them writes it.
The history is in a segment, a file in shared memory (`shared_memory.py`).

`NodeHistory` writes, `SharedHistory` reads, and `CombinedSource` is the draft source of a rollout's
engine. docs/explanation/drafts.md has the interleavings.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rollstream.errors import StoreError
from rollstream.producers.drafts import shared_memory
from rollstream.producers.drafts.history import AnswerHistory, OccurrenceChoice
from rollstream.producers.drafts.index import Draft, HistoryView, look_up_draft
from rollstream.streams.values import Tokens

REFRESH_EVERY_LOOKUPS = 256  # look-ups between two checks whether the file was replaced, 1 µs each


class SharedHistory:
    """Looks up drafts in the segment at `path` (`NodeHistory.path`), without locks. While there is
    no segment at this path it returns no drafts; it changes to a segment that replaces the
    mapped one. It needs neither torch nor a log, so an engine's own processes can use it.

    With `holds` no process removes the file while it is mapped: rollouts hold it, and an engine's
    process, which ends with its rollout, does not have to.
    """

    context = shared_memory.NGRAM_LENGTHS[-1]

    def __init__(self, path: str | Path, holds: bool = False) -> None:
        self.path, self._holds = Path(path), holds
        self._nothing = HistoryView(shared_memory.allocate_memory(shared_memory.HistoryLayout(16)))
        self._view = self._nothing
        self._segment: shared_memory.HistorySegment | None = None
        self._asked = 0

    @property
    def attached(self) -> bool:
        """Whether a segment is mapped."""
        return self._segment is not None

    def view(self) -> HistoryView:
        """Return the view for look-ups now (`index.look_up_draft`)."""
        if self._asked % REFRESH_EVERY_LOOKUPS == 0:
            self.refresh()
        self._asked += 1
        return self._view

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        return look_up_draft((self.view(),), prompt, newest, most)

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Do nothing: running sequences are not in the node's history (see `CombinedSource`)."""

    def refresh(self) -> None:
        """Map the segment under this name if it is new and has a writer; otherwise the present
        segment stays mapped.
        """
        try:
            inode = os.stat(self.path).st_ino
        except OSError:
            return
        if self._segment is not None and self._segment.inode == inode:
            return
        found = shared_memory.map_segment(self.path, holds=self._holds)
        if found is None:
            return
        if found.memory.layout.lengths != shared_memory.NGRAM_LENGTHS:  # written by another release
            found.close()
            return
        self.close()
        self._segment, self._view = found, HistoryView(found.memory)

    def close(self) -> None:
        """Unmap the segment; look-ups find nothing until `view` maps one again."""
        if self._segment is not None:
            self._segment.close()
        self._segment, self._view = None, self._nothing


log = logging.getLogger(__name__)

LEAVE_TRIES, LEAVE_PAUSE_S = 10, 0.005  # another leaving process holds the lock for less time


class NodeHistory:
    """Gives this process the node's history, to draft from or to write. `folder` is the same for
    all processes of a run on a node (`shared_memory.segment_folder`). `choice` selects among the
    earlier occurrences of a pattern.

    The process that holds the lock of `folder` writes. The kernel frees the lock when its holder
    dies in any way, and the next process that calls `take_over` becomes the writer: it continues in
    the same memory, from which the others keep drafting.
    """

    def __init__(
        self, folder: Path, tokens_max: int, choice: OccurrenceChoice = "priority"
    ) -> None:
        self.folder, self.path = folder, folder / shared_memory.HISTORY_FILE
        self._layout = shared_memory.HistoryLayout(tokens_max)
        self._choice: OccurrenceChoice = choice
        self._shared = SharedHistory(self.path, holds=True)
        self._lock: int | None = None
        self._written: shared_memory.HistorySegment | None = None
        self._alone: AnswerHistory | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the history."""
        return self._lock is not None

    def view(self) -> HistoryView:
        """Return the view for look-ups now."""
        return self._shared.view() if self._alone is None else self._alone.view

    def take_over(self) -> AnswerHistory | None:
        """Become the writer and return the history, or return None while another process of the
        node writes; the caller then tries again later. A new writer first removes segments that
        killed runs left and no process uses. The caller then inserts the log's answers, from as
        far back as the history reaches, also those that an earlier writer inserted. Without room
        for shared memory the history is private to this process, with a warning.
        """
        assert not self.is_writer, "this process writes already"
        try:
            self._lock = shared_memory.lock_folder(self.folder)
            if self._lock is None:
                self._shared.refresh()
                return None
            shared_memory.sweep_dead_segments(self.folder)
            self._written = self._left_by_another() or shared_memory.make_segment(
                self.folder, self._layout
            )
            self._written.memory.words[shared_memory.WRITER_WORD] = os.getpid()
        except StoreError as error:
            log.warning("%s; earlier answers are kept by this process alone", error)
            self._unlock()
            self._alone = self._history(None)
            return self._alone
        self._shared.refresh()
        return self._history(self._written)

    def leave(self) -> None:
        """Stop drafting and writing; the last process of the node removes the memory."""
        self._shared.close()
        if self._written is not None:
            self._written.close()
            self._written = None
        for _ in range(LEAVE_TRIES):
            try:
                self._lock = (
                    shared_memory.lock_folder(self.folder) if self._lock is None else self._lock
                )
            except StoreError:
                return
            if self._lock is not None:
                shared_memory.remove_segment(self.folder)
                self._unlock()
                return
            if not self.path.exists():
                return
            time.sleep(LEAVE_PAUSE_S)

    def _left_by_another(self) -> shared_memory.HistorySegment | None:
        """Map the segment that other processes use, for writing; None unless it has the layout of
        this process.
        """
        if not self._shared.attached and not shared_memory.is_held(self.path):
            return None
        found = shared_memory.map_segment(self.path, writes=True)
        if found is None or found.memory.layout == self._layout:
            return found
        found.close()
        return None

    def _history(self, segment: shared_memory.HistorySegment | None) -> AnswerHistory:
        memory = None if segment is None else segment.memory
        layout = self._layout
        return AnswerHistory(layout.tokens_max, layout.lengths, self._choice, layout.reach, memory)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


RUNNING_TOKENS_MIN = 1024


class CombinedSource:
    """Looks up drafts for a rollout's engine in two histories of the same n-gram lengths: the
    node's, and `running`, which holds the sequences that run in this engine (Seer's siblings);
    other processes get these later or never.

    If both match equally many tokens, the running sequences are used: they come from the newest
    weights. They are kept in a small separate history, where they are soon overwritten.
    """

    def __init__(self, node: NodeHistory | SharedHistory, running: AnswerHistory) -> None:
        self.node, self._running = node, running
        self.context = running.context

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        return look_up_draft((self._running.view, self.node.view()), prompt, newest, most)

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens, which the engine generated, to the running
        history.
        """
        self._running.add_running(prompt, group, tokens, fresh)


def running_tokens(slots: int, context_max: int, tokens_max: int) -> int:
    """Return the size, in tokens, of the history of running sequences: a full batch, or a quarter
    of the node's history (`tokens_max`) if that is less.
    """
    return max(RUNNING_TOKENS_MIN, min(slots * context_max, tokens_max // 4))
