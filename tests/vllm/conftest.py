"""Tests on the real vLLM: they share the samples of the other engines' tests, and say what to
install where it is missing. Engines of one process interfere, so each module runs in its own
(`make test-vllm`).
"""

import sys
from pathlib import Path

import pytest

from producers.engines.vllm_engine.environment import installed

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))


@pytest.fixture(autouse=True)
def vllm_is_here() -> None:
    if installed() is None:
        pytest.fail("vLLM is not installed: `make vllm` brings its CPU build", pytrace=False)
