"""Every store that there is, for the tests of the contract and of what is built on it."""

import pytest

from storage.connect import open_store
from storage.memory_store import MemoryStore


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else open_store(f"file:{tmp_path}/store")
