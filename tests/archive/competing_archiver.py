"""An archiver without a lease that runs at full speed until it is killed: `python -m
tests.archive.competing_archiver BUS_FOLDER STORE_FOLDER`.
"""

import sys

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus

if __name__ == "__main__":
    bus, store = open_bus(f"sqlite:{sys.argv[1]}"), open_store(f"file:{sys.argv[2]}")
    settings = ArchiveSettings(roll_bytes=4000, roll_s=0.02)
    archive = TopicArchive(bus, store, "tiny", "trajectories", settings)
    archive.start()
    print("up", flush=True)
    while True:
        archive.advance()
