"""A rollout's draft feed as a process of its own: `python -m tests.drafts.node_rollout BUS FOLDER`.
It polls a hundred times a second, as a rollout does, and answers one line of JSON for each line
that it reads: `["draft", group, newest]` → tokens, `["writes"]` → whether it fills the history,
`["leave"]` → it ends in order.
"""

import json
import queue
import sys
import threading
from pathlib import Path

from rollstream.producers.drafts.feed import DraftFeed
from rollstream.producers.drafts.node import NodeHistory
from rollstream.producers.engines.base import DraftStats
from rollstream.streams.connect import open_bus
from tests.drafts.drafts_log import guessed

TOKENS = 4096


def main() -> None:
    bus, node = open_bus(sys.argv[1]), NodeHistory(Path(sys.argv[2]), TOKENS)
    draft_feed = DraftFeed(bus, lambda: bus, node)
    asked: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: [asked.put(line) for line in sys.stdin], daemon=True).start()
    while True:
        draft_feed.poll()
        try:
            what, *rest = json.loads(asked.get(timeout=0.01))
        except queue.Empty:
            continue
        if what == "draft":
            print(json.dumps(guessed(node.view(), *rest)), flush=True)
        elif what == "writes":
            print(json.dumps(node.is_writer), flush=True)
        else:
            draft_feed.close(DraftStats())
            bus.close()
            return


if __name__ == "__main__":
    main()
