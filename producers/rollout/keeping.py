"""A rollout's part in the history of its node: whether it is the one that fills it, and from what.

One rollout of a node remembers what the log says; when it ends, however it ends, the next one that
looks does. All draft from the same memory (`drafts/node.py`).
"""

import atexit
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from producers.engines.base import DraftStats
from producers.engines.drafts.node import NodeHistory
from producers.rollout.remembering import Remembering
from streams.bus import Bus
from streams.reader import TopicReader

log = logging.getLogger(__name__)

# Until the next look of an engine that drafts nothing: so many times what this one took, at most so
# many seconds, as the first one opens an archive.
REST, REST_S = 50, 1.0


@dataclass(slots=True)
class Keeping:
    """`earlier` opens the log with its archive in front of it; only who fills the history needs
    it. A process that ends, by an error too, lets go of the history; only a kill leaves it there.
    """

    bus: Bus
    earlier: Callable[[], Bus]
    node: NodeHistory
    remembering: Remembering | None = None
    clock: Callable[[], float] = time.perf_counter
    rests_until: float = 0.0

    def __post_init__(self) -> None:
        atexit.register(self.node.leave)  # an engine that refuses, a higher term, an error

    def look(self, drafts: bool = True) -> None:
        """Take in what has arrived, a bounded part of it, or see whether that is ours to do now.
        While the engine drafts nothing, as where no prompt comes twice, a fiftieth of its time.
        """
        began = self.clock()
        if drafts or began >= self.rests_until:
            self._look()
            now = self.clock()
            self.rests_until = now + min(REST * (now - began), REST_S)

    def _look(self) -> None:
        if self.remembering is None:
            history = self.node.take_over()
            if history is None:
                return
            log.info("drafts: this process fills the history in %s", self.node.folder)
            self.remembering = Remembering(self.bus, self.earlier(), history)
        self.remembering.look()

    def conclude(self, drafts: DraftStats) -> None:
        """Say in the log what drafting came to, and let go of the history."""
        records = 0 if self.remembering is None else self.remembering.records
        log.info(
            "drafts: %d answers remembered, %d of %d drafts found, %d of %d tokens right, "
            "%.2f tokens per row and pass, %.2f s looking up",
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
        """None while another process reads; any thread may ask."""
        remembering = self.remembering
        return [] if remembering is None else remembering.readers()
