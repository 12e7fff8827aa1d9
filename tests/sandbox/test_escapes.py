"""No attempt to leave a sandbox has its effect, and without a sandbox each has (as root)."""

import pytest

from rollstream.producers.sandbox.base import SandboxOptions
from rollstream.producers.sandbox.bubblewrap import Bubblewrap
from testbed.escapes.attempts import ATTEMPTS, Attempt
from testbed.escapes.unconfined import Unconfined
from testbed.servers import bubblewrap

HARMLESS = ("file_read", "environment", "network_tcp", "process_kill", "shared_memory", "links")
"""Attempts that succeed without a sandbox for every user, and cost nothing."""


@pytest.fixture(scope="module")
def backend() -> Bubblewrap:
    return Bubblewrap(SandboxOptions(), str(bubblewrap.program()))


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_no_attempt_leaves_the_sandbox(attempt: Attempt, backend: Bubblewrap):
    assert not attempt.succeeds(backend)


@pytest.mark.parametrize("name", HARMLESS)
def test_the_same_attempt_succeeds_without_a_sandbox(name: str):
    attempt = next(one for one in ATTEMPTS if one.name == name)
    assert attempt.succeeds(Unconfined())
