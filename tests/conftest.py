"""What all tests share: signals as in a terminal, and which real servers were used."""

import signal

import pytest

from tests.servers import used

# A shell that starts us in the background has SIGINT ignored, and children inherit that; tests send
# it to processes of their own.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the real servers, so that nobody takes a run without them for one with them."""
    if used():
        terminalreporter.section("real servers used")
        for name, what in sorted(used().items()):
            terminalreporter.line(f"{name}: {what}")
