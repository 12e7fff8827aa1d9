"""Stop signals of a process that waits for them."""

import signal
import subprocess
import sys
from typing import Any

import pytest

from rollstream.run.signals import terminable
from testbed.waiting import WAIT_S

SIGNAL_INSIDE_WAIT = """
import signal, sys, threading
from rollstream.run.signals import listen_for_signals

signal.signal(signal.{name}, signal.SIG_DFL)  # `nohup` starts a test run that ignores SIGHUP
signals = listen_for_signals()

def interrupt(frame, event, argument):
    if frame.f_code is threading.Condition.wait.__code__:  # Event.wait holds the event's lock here
        sys.settrace(None)
        signal.raise_signal(signal.{name})

sys.settrace(interrupt)
while not signals.stop.wait(0.01):
    pass
assert not signals.hurry.is_set()
signal.raise_signal(signal.{name})
signals.hurry.wait()
print("ended")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_inside_a_wait_for_it_ends_the_wait(number: signal.Signals) -> None:
    """The handler takes no lock that the interrupted wait holds."""
    code = SIGNAL_INSIDE_WAIT.format(name=number.name)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ended.stdout == "ended\n", ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda number, frame: None])
def test_a_command_that_reports_its_end_is_ended_by_every_stop_signal(
    number: signal.Signals, handler: Any
) -> None:
    before = signal.signal(number, handler)
    try:
        with pytest.raises(KeyboardInterrupt), terminable():
            signal.raise_signal(number)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
