"""A log for one test of agents."""

from collections.abc import Generator
from pathlib import Path

import pytest

from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue

pytest.importorskip("starlette", reason="the extra `agents` is not installed")
pytest.importorskip("openai", reason="the extra `agents` is not installed")


@pytest.fixture
def bus(tmp_path: Path) -> Generator[Bus]:
    opened = open_bus(f"sqlite:{tmp_path / 'bus'}")
    opened.create(catalogue(1))
    yield opened
    opened.close()
