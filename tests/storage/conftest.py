"""Every store that there is, and a tiny model, for the tests of this folder."""

import pytest
from storage_samples import TINY

from storage.connect import open_store
from storage.memory_store import MemoryStore
from storage.model import build_model


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else open_store(f"file:{tmp_path}/store")


@pytest.fixture(scope="session")
def tiny_model():
    return build_model("Qwen3ForCausalLM", TINY, seed=3)
