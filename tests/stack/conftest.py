"""One daemon for the tests of the stack, with the images built, in a network of its own. Where none
can be started the tests fail and say what to do; they never pass without one.
"""

from collections.abc import Iterator

import pytest

from testbed.stack.daemon import StackDaemon
from testbed.stack.images import built_daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[StackDaemon]:
    with built_daemon() as started:
        yield started
