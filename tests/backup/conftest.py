"""A finished run whose log begins above 0; each test has a copy of it."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.storage.identity import read_or_create_identity
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from tests.backup.copies import store_of
from tests.support.kept_run import made


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made(tmp_path_factory.mktemp("finished"), archive=True, truncate=True)
    read_or_create_identity(store_of(folder), "tiny")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def bus(run: Path) -> Iterator[Bus]:
    with closing(open_bus(f"sqlite:{run}/bus")) as opened:
        yield opened
