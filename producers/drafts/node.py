"""One history for all rollouts of a node: each of them drafts from it, one of them writes it.

The holder of the folder's lock writes. The kernel frees the lock when its holder dies, however it
dies, so the next process that asks takes over: it continues in the same memory, from which the
others keep drafting, and inserts the log's answers again from as far back as the history reaches.
A segment that a killed run left and no process uses is removed first. docs/histospec.md has the
interleavings.
"""

import logging
import os
import time
from pathlib import Path

from rollstream.producers.drafts.history import OccurrenceChoice, AnswerHistory
from rollstream.producers.drafts.source import HistoryView
from rollstream.producers.drafts.memory import WRITER_WORD, HistoryLayout
from rollstream.producers.drafts.shared_memory import HISTORY_FILE, HistorySegment, is_held, lock_folder, make_segment, map_segment, remove_segment, sweep_dead_segments
from rollstream.producers.drafts.shared import SharedHistory
from rollstream.errors import StoreError

log = logging.getLogger(__name__)

LEAVE_TRIES, LEAVE_PAUSE_S = 10, 0.005  # another leaving process holds the lock for less


class NodeHistory:
    """The node's history in this process. `folder` is the same for all processes of a run on a node
    (`segment.segment_folder`).
    """

    def __init__(self, folder: Path, tokens_max: int, choice: OccurrenceChoice = "priority") -> None:
        self.folder, self.path = folder, folder / HISTORY_FILE
        self._layout = HistoryLayout(tokens_max)
        self._choice: OccurrenceChoice = choice
        self._shared = SharedHistory(self.path, holds=True)
        self._lock: int | None = None
        self._written: HistorySegment | None = None
        self._alone: AnswerHistory | None = None

    @property
    def writes(self) -> bool:
        """Whether this process writes the history."""
        return self._lock is not None

    def view(self) -> HistoryView:
        """The view for look-ups now."""
        return self._shared.view() if self._alone is None else self._alone.view

    def take_over(self) -> AnswerHistory | None:
        """Become the writer. Returns the history to fill, from its beginning on, or None while
        another process of the node writes; the caller tries again from time to time.
        """
        assert not self.writes, "this process writes already"
        try:
            self._lock = lock_folder(self.folder)
            if self._lock is None:
                self._shared.refresh()
                return None
            sweep_dead_segments(self.folder)
            self._written = self._left_by_another() or make_segment(self.folder, self._layout)
            self._written.memory.words[WRITER_WORD] = os.getpid()
        except StoreError as error:
            log.warning("%s; earlier answers are remembered by this process alone", error)
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
                self._lock = lock_folder(self.folder) if self._lock is None else self._lock
            except StoreError:
                return
            if self._lock is not None:
                remove_segment(self.folder)
                self._unlock()
                return
            if not self.path.exists():
                return
            time.sleep(LEAVE_PAUSE_S)

    def _left_by_another(self) -> HistorySegment | None:
        """The segment that other processes use, if it has the layout of this one's."""
        if not self._shared.attached and not is_held(self.path):
            return None
        found = map_segment(self.path, writes=True)
        if found is None or found.memory.layout == self._layout:
            return found
        found.close()
        return None

    def _history(self, segment: HistorySegment | None) -> AnswerHistory:
        memory = None if segment is None else segment.memory
        layout = self._layout
        return AnswerHistory(layout.tokens_max, layout.lengths, self._choice, layout.reach, memory)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None
