"""A finished run that the tests of the report read."""

import pytest

from rollstream.run.config.run_folder import RunFolder
from tests.support.synthetic_run import publish_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> RunFolder:
    """A finished run of 60 steps; only read it."""
    return publish_run(tmp_path_factory.mktemp("synthetic") / "run")
