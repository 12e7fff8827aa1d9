"""A plugin of pytest that chooses the tests of `make quick`: the core's, in one process. A file is
chosen by its folder and by what it uses, which is neither a server nor another process nor a whole
run; of a test for several back ends the form in memory is run. Property tests are left to
`make test`.

    python -m pytest -p testbed.quick_tests -m "not slow and not long and not hypothesis" tests
"""

import re
from pathlib import Path

import pytest

from testbed.repository import ROOT

TESTS = ROOT / "tests"
FOLDERS = (
    "streams", "storage", "storage/weights", "storage/weights/delta", "dispatch", "rollout",
    "rollout/weights", "trainer", "trainer/data",
)  # fmt: skip
"""The folders of the core's tests; those of its options are below them, too."""
USES = re.compile(r"testbed\.(?:servers|run_)|subprocess|multiprocessing|tiny_run|stream_publisher")
"""Servers, processes and whole runs."""
BACK_ENDS = ("bus", "embedded_bus", "store", "s3_url")
"""Fixtures that are made for several back ends."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A file that is not chosen is not even imported."""
    if collection_path.suffix != ".py":
        leads_there = any((TESTS / folder).is_relative_to(collection_path) for folder in FOLDERS)
        return None if leads_there else True
    is_core = collection_path.parent in [TESTS / folder for folder in FOLDERS]
    return None if is_core and not USES.search(collection_path.read_text("utf-8")) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if is_in_memory(item)]


def is_in_memory(item: pytest.Item) -> bool:
    """Whether all the test's back ends are those in memory."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    return all(given.get(name, "memory") == "memory" for name in BACK_ENDS)
