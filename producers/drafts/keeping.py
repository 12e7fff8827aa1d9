"""Fills the draft history of a node from the log, in exactly one rollout of the node at a time.

The filling rollout reads finished and running trajectories from the log. When it ends, for whatever
reason, the next rollout that polls takes over. All rollouts of the node draft from the same shared
memory (`drafts/node.py`).
"""

import atexit
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollstream.producers.engines.base import DraftStats
from rollstream.producers.drafts.node import NodeHistory
from rollstream.producers.drafts.feed import HistoryFeed
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader

log = logging.getLogger(__name__)

# While the engine drafts nothing, the pause after a poll is this multiple of the poll's duration,
# but at most this many seconds: the first poll opens an archive and takes long.
IDLE_POLL_FACTOR, IDLE_POLL_S_MAX = 50, 1.0


@dataclass(slots=True)
class DraftFeed:
    """`earlier` opens the log with its archive in front of it; only the rollout that fills the
    history calls it. A process that ends, also by an error, releases the history; only a kill
    leaves it held.
    """

    bus: Bus
    earlier: Callable[[], Bus]
    node: NodeHistory
    history_feed: HistoryFeed | None = None
    clock: Callable[[], float] = time.perf_counter
    idle_until_s: float = 0.0

    def __post_init__(self) -> None:
        atexit.register(self.node.leave)  # also after an engine's refusal, a higher term, an error

    def poll(self, drafts: bool = True) -> None:
        """Read a bounded number of records into the history, or try to become the process that
        fills it. While the engine drafts nothing, as where no prompt repeats, this takes at most
        1/50 of the time.
        """
        began = self.clock()
        if drafts or began >= self.idle_until_s:
            self._poll()
            now = self.clock()
            self.idle_until_s = now + min(IDLE_POLL_FACTOR * (now - began), IDLE_POLL_S_MAX)

    def _poll(self) -> None:
        if self.history_feed is None:
            history = self.node.take_over()
            if history is None:
                return
            log.info("drafts: this process fills the history in %s", self.node.folder)
            self.history_feed = HistoryFeed(self.bus, self.earlier(), history)
        self.history_feed.poll()

    def close(self, drafts: DraftStats) -> None:
        """Log the draft statistics and release the history."""
        records = 0 if self.history_feed is None else self.history_feed.records
        log.info(
            "drafts: %d answers in the history, %d of %d lookups found a draft, "
            "%d of %d draft tokens accepted, "
            "%.2f tokens per row and pass, %.2f s in lookups",
            records,
            drafts.found,
            drafts.asked,
            drafts.accepted,
            drafts.proposed,
            drafts.gained / max(1, drafts.rows),
            drafts.lookup_s,
        )
        atexit.unregister(self.node.leave)
        self.node.leave()

    def readers(self) -> list[TopicReader]:
        """Empty while another process fills the history. Any thread may call it."""
        history_feed = self.history_feed
        return [] if history_feed is None else history_feed.readers()
