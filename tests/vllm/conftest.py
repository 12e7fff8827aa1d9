"""Tests on the real vLLM; where it is missing they fail and name what to install. Engines of one
process interfere, so each module runs in its own (`make test-vllm`).
"""

import os
from collections.abc import Generator

import pytest

from rollstream.producers.engines.vllm.local.environment import installed_release
from testbed.servers.guard import VARIABLE, end_started


@pytest.fixture(autouse=True)
def vllm_is_here() -> None:
    if installed_release() is None:
        pytest.fail("vLLM is not installed: `make vllm` brings its CPU build", pytrace=False)


@pytest.fixture(autouse=True)
def variables_stay() -> None:
    """The import of vLLM and of its parts sets variables for the whole process, at any time."""


@pytest.fixture(scope="module", autouse=True)
def engines_end() -> Generator[None]:
    """The engines of a module serve all of its tests, and vLLM ends their processes with this one
    only: they are killed once the module's tests have ended.
    """
    yield
    end_started(os.environ[VARIABLE].rpartition("/")[2])
