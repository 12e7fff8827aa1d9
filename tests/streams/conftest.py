"""All buses, a real Kafka among them, under one manual clock."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.storage.claim_check import ClaimCheck
from rollstream.storage.stores.file import FileStore
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from testbed.memory import MemoryBus
from testbed.servers import kafka_broker
from tests.support.hand_clock import HandClock

EMBEDDED = ["sqlite", "memory"]
CLAIMS_ABOVE = 12  # bytes: with it nearly every record of the suite is a claim


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def opened(kind: str, folder: Path, clock: HandClock) -> Iterator[Bus]:
    url = kafka_broker.new_url() if kind == "kafka" else f"sqlite:{folder}/bus"
    bus = MemoryBus(clock) if kind == "memory" else open_bus(url, clock)
    if kind == "claims":
        bus = ClaimCheck(bus, FileStore(str(folder / "store")), CLAIMS_ABOVE)
    yield bus
    bus.close()


@pytest.fixture(params=[*EMBEDDED, "claims", "kafka"])
def bus(request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock) -> Iterator[Bus]:
    yield from opened(request.param, tmp_path, clock)


@pytest.fixture(params=EMBEDDED)
def embedded_bus(request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock) -> Iterator[Bus]:
    """Waits for work that a broker does in its own time: retention, compaction, leases by the
    manual clock.
    """
    yield from opened(request.param, tmp_path, clock)
