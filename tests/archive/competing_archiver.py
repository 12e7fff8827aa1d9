"""An archiver without a lease that runs at full speed until it is killed: `python -m
tests.archive.competing_archiver BUS_FOLDER STORE_FOLDER`.
"""

import sys
import threading

from rollstream.consumers.archive.compaction import Compactor
from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus

TOPIC = "trajectories"

if __name__ == "__main__":
    bus, store = open_bus(f"sqlite:{sys.argv[1]}"), open_store(f"file:{sys.argv[2]}")
    settings = ArchiveSettings(
        roll_bytes=4000, roll_s=0.02, compact_grace_s=0.1, compact_bytes=60_000, topics=(TOPIC,)
    )
    compactor, stop = Compactor(store, "tiny", settings, files_max=3), threading.Event()
    archive = TopicArchive(bus, store, "tiny", TOPIC, settings)
    archive.start()
    print("up", flush=True)
    while True:
        archive.advance()
        compactor.advance(stop)
