"""Waiting for other threads and processes: `wait_for` is the one poll loop of the tests.

A test that passes returns as soon as its condition holds, so the bound only ends a hang: it is that
of a machine whose cores other programs keep busy. Import as `testbed.waiting`, from everywhere.
"""

import subprocess
import time
from collections.abc import Callable

WAIT_S = 600.0
PAUSE_S, PAUSE_S_MAX = 0.002, 0.1
"""Of the first look and of later ones: what takes long is often costly to look at, too."""


def wait_for(
    condition: Callable[[], object],
    process: subprocess.Popen[bytes] | None = None,
    said: Callable[[], str] = lambda: "",
) -> None:
    """Return once `condition` holds; fail after `WAIT_S`, or when `process` has ended without it,
    with the text of `said`.
    """
    give_up, pause_s = time.monotonic() + WAIT_S, PAUSE_S
    while True:
        ended = process is not None and process.poll() is not None  # before the look: no race
        if condition():
            return
        assert not ended, f"the process ended early {said()}"
        assert time.monotonic() < give_up, f"not within {WAIT_S:g} s {said()}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, PAUSE_S_MAX)
