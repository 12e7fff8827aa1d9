"""Both buses under one clock that tests move by hand."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hand_clock import HandClock

from streams.bus import Bus
from streams.memory_bus import MemoryBus
from streams.sqlite_bus import SqliteBus


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=["sqlite", "memory"])
def bus(request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock) -> Iterator[Bus]:
    make: dict[str, Callable[[], Bus]] = {
        "sqlite": lambda: SqliteBus(tmp_path / "bus", clock),
        "memory": lambda: MemoryBus(clock),
    }
    opened = make[request.param]()
    yield opened
    opened.close()
