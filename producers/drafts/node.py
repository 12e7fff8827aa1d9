"""One history of earlier answers for all rollouts of a node, in shared memory: all look up, one
writes (docs/explanation/drafts.md).
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rollstream.deadline import Deadline
from rollstream.errors import StoreError
from rollstream.producers.drafts import shared_memory
from rollstream.producers.drafts.history import AnswerHistory, OccurrenceChoice
from rollstream.producers.drafts.index import HistoryView, look_up_draft
from rollstream.producers.engines.drafting import Draft
from rollstream.streams.values import Tokens

REFRESH_EVERY_LOOKUPS = 256  # look-ups between two checks (1 µs) whether the file was replaced


class SharedHistory:
    """Looks up drafts in the segment at `path`, without locks, while another process may write it.
    It follows a segment that replaces the mapped one.

    With `holds`, as in a rollout, no process removes the file while it is mapped.
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
        return self._segment is not None

    def view(self) -> HistoryView:
        if self._asked % REFRESH_EVERY_LOOKUPS == 0:
            self.refresh()
        self._asked += 1
        return self._view

    def draft(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
        return look_up_draft((self.view(),), prompt, newest, tokens_max)

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Do nothing: running sequences are in `CombinedSource`."""

    def refresh(self) -> None:
        try:
            inode = os.stat(self.path).st_ino
        except OSError:
            return
        if self._segment is not None and self._segment.inode == inode:
            return
        segment = shared_memory.map_segment(self.path, holds=self._holds)
        if segment is None:
            return
        # Written by another release.
        if segment.memory.layout.lengths != shared_memory.NGRAM_LENGTHS:
            segment.close()
            return
        self.close()
        self._segment, self._view = segment, HistoryView(segment.memory)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment, self._view = None, self._nothing


log = logging.getLogger(__name__)

# Tries of a leaving process to get the lock while others use the memory, and the pause between two.
LEAVE_TRIES, LEAVE_PAUSE_S = 10, 0.005
LEAVE_S = 10.0  # for this long it waits for the lock if no process uses the memory


class NodeHistory:
    """The node's history, to look up drafts (`view`) or to write it (`take_over`). The process that
    holds the lock of `folder` writes.

    The kernel frees the lock when its holder dies; the next process that calls `take_over`
    continues in the same memory.
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
        return self._lock is not None

    def view(self) -> HistoryView:
        return self._shared.view() if self._alone is None else self._alone.view

    def take_over(self) -> AnswerHistory | None:
        """Become the writer; None while another process of the node writes. Without a usable folder
        a warning is logged, and the history is in private memory.
        """
        assert not self.is_writer, "this process writes already"
        try:
            self._lock = shared_memory.lock_folder(self.folder)
            if self._lock is None:
                self._shared.refresh()
                return None
            # Killed runs left them.
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
        tries, deadline = LEAVE_TRIES, Deadline(LEAVE_S)
        while tries and not deadline.passed():
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
            # Two may leave at once: A has the lock, finds that B uses the memory, and keeps it; B
            # stops using it before A gives the lock back. It is unused then, so B waits for the
            # lock.
            tries -= shared_memory.is_held(self.path)
            time.sleep(LEAVE_PAUSE_S)

    def _left_by_another(self) -> shared_memory.HistorySegment | None:
        # No process uses it.
        if not self._shared.attached and not shared_memory.is_held(self.path):
            return None
        segment = shared_memory.map_segment(self.path, writes=True)
        if segment is None or segment.memory.layout == self._layout:
            return segment
        segment.close()
        return None

    def _history(self, segment: shared_memory.HistorySegment | None) -> AnswerHistory:
        memory = None if segment is None else segment.memory
        layout = self._layout
        return AnswerHistory(layout.tokens_max, layout.lengths, self._choice, layout.reach, memory)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


RUNNING_TOKENS_MIN = 1024  # least size of the history of running sequences


class CombinedSource:
    """Looks up drafts in the node's history and in `running`, a private one of this engine's
    sequences. Both have the same n-gram lengths.
    """

    def __init__(self, node: NodeHistory | SharedHistory, running: AnswerHistory) -> None:
        self.node, self._running = node, running
        self.context = running.context

    def draft(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
        # If both match equally many tokens, the running sequences' are used: the newest weights
        # made them.
        return look_up_draft((self._running.view, self.node.view()), prompt, newest, tokens_max)

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        self._running.add_running(prompt, group, tokens, fresh)


def running_tokens(slots: int, context_max: int, tokens_max: int) -> int:
    """Returns the size, in tokens, of the history of running sequences."""
    # Ended sequences are soon overwritten.
    return max(RUNNING_TOKENS_MIN, min(slots * context_max, tokens_max // 4))
