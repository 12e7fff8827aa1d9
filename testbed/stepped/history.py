"""The draft history of a stepped run: the product's own, one for all its rollouts. The engine there
drafts nothing; the tests cover which rollout writes, and what it reads.
"""

import atexit
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rollstream.producers.drafts.feed import DraftFeed
from rollstream.producers.drafts.node import NodeHistory
from rollstream.streams.bus import Bus

TOKENS = 1024


@contextmanager
def remembering(
    folder: Path, bus: Bus, earlier: Bus, counts: Counter[str], clock: Callable[[], float]
) -> Generator[DraftFeed]:
    """A rollout's part in it. However it ends, its locks are freed, as a kernel frees those of a
    process.
    """
    node = NodeHistory(folder / "rollstream-stepped-drafts", TOKENS)
    draft_feed = DraftFeed(bus, lambda: earlier, node, clock=clock)
    try:
        yield draft_feed
    finally:
        if draft_feed.history_feed is not None:
            counts["histories taken over"] += 1
            counts["remembered"] += draft_feed.history_feed.records
        atexit.unregister(node.leave)
        node._shared.close()  # pyright: ignore[reportPrivateUsage]
        if node._written is not None:  # pyright: ignore[reportPrivateUsage]
            node._written.close()  # pyright: ignore[reportPrivateUsage]
        node._unlock()  # pyright: ignore[reportPrivateUsage]
