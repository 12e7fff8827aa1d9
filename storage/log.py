"""Opens a run's log as every role and reader does: the bus with its claim check."""

from typing import Literal

from rollstream.storage.claim_check import ClaimCheck
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus


def open_log(bus_url: str, store_url: str, sync: Literal["normal", "full"] = "normal") -> Bus:
    """The bus at `bus_url`, with its large records in the store at `store_url`."""
    return ClaimCheck(open_bus(bus_url, sync=sync), open_store(store_url, sync))
