"""The healthy run once, and a copy of it for each test that damages it."""

import shutil
from pathlib import Path

import pytest

from testbed.violations.healthy_run import make_run


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only read it."""
    return make_run(tmp_path_factory.mktemp("audited") / "run")


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy to plant a violation in."""
    return Path(shutil.copytree(healthy, tmp_path / "run"))
