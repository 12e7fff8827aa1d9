"""Tests on the real vLLM; where it is missing they fail and name what to install. Engines of one
process interfere, so each module runs in its own (`make test-vllm`).
"""

import pytest

from rollstream.producers.engines.vllm.environment import installed_release


@pytest.fixture(autouse=True)
def vllm_is_here() -> None:
    if installed_release() is None:
        pytest.fail("vLLM is not installed: `make vllm` brings its CPU build", pytrace=False)
