"""The small run whose every count is known, living and as an archive, and the example archive, each
served by the explorer's own server.
"""

import shutil

import pytest

from testbed.explorer_server import serving
from testbed.repository import ROOT
from tests.analysis.asked_run import archive, make_run

EXAMPLE = ROOT / "examples" / "archive"


@pytest.fixture(scope="session")
def asked_folders(tmp_path_factory):
    """The run with its log, and the archive of it alone; only read them."""
    root = tmp_path_factory.mktemp("explored")
    living = make_run(root / "living")
    archived = make_run(root / "archived")
    archive(archived)
    shutil.rmtree(archived / "bus")
    return {"living": living, "archived": archived}


@pytest.fixture(scope="session", params=["living", "archived"])
def asked(request, asked_folders):
    with serving([str(asked_folders[request.param])]) as server:
        yield server


@pytest.fixture(scope="module")  # the process of its SQL ends with the file that asked it
def living(asked_folders):
    with serving([str(asked_folders["living"])], with_sql=True) as server:
        yield server


@pytest.fixture(scope="session")
def example():
    with serving([str(EXAMPLE)]) as server:
        yield server
