"""A program that publishes versions of a named weight stream beside a trainer, in children that end
themselves with SIGKILL at one of their writes to the store.

`python -m tests.trainer.stream_publisher BUS STORE RUN STREAM VERSIONS FATAL …`
"""

import os
import signal
import sys

from rollstream.storage.stores.base import Data
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.part import StorePart
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.streams.connect import open_bus
from testbed.versions import publish_small, small_tensors


class DeadlyStore(StorePart):
    """Kills the process after write number `fatal`, from 1; never for 0."""

    fatal = 0

    def put(self, key: str, data: Data) -> str:
        return self._counted(super().put(key, data))

    def create(self, key: str, data: Data) -> str:
        return self._counted(super().create(key, data))

    def swap(self, key: str, data: Data, etag: str) -> str:
        return self._counted(super().swap(key, data, etag))

    def _counted(self, etag: str) -> str:
        self.fatal -= 1
        if self.fatal == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return etag


def publish(bus_url: str, store_url: str, run: str, name: str, versions: int, fatal: int) -> None:
    """Publish the versions that are not believed yet, up to number `versions` - 1."""
    store = DeadlyStore(open_store(store_url), "")
    store.fatal = fatal
    bus = open_bus(bus_url)
    writer = publish_small(bus, store, run, WeightStream(name), ())
    for number in range(writer.highest.number + 1 if writer.highest else 0, versions):
        writer.publish(number, small_tensors(number))
        writer.retain()
    bus.close()


def main() -> None:
    bus_url, store_url, run, name, versions, *fatals = sys.argv[1:]
    for fatal in map(int, fatals):
        child = os.fork()
        if not child:
            publish(bus_url, store_url, run, name, int(versions), fatal)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (-signal.SIGKILL if fatal else 0), f"it ended with {status} at {fatal}"


if __name__ == "__main__":
    main()
