"""Waiting for other threads and processes: `wait_for` is the one poll loop of the tests, and
`let_pass` the one sleep.

A test that passes returns as soon as its condition holds, so the bound only ends a hang, also on a
machine whose cores other programs keep busy. Import it as `testbed.waiting` everywhere.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
WAIT_S = 600.0
PAUSE_S, PAUSE_S_MAX = 0.002, 0.1
"""Pauses before the first and later polls: a slow condition is often costly to check, too."""


def let_pass(seconds: float) -> None:
    """Lets time pass where that is the load or the fault itself: a slow reward, an outage of some
    seconds, the pace of a writer. What waits for something calls `wait_for`.
    """
    time.sleep(seconds)


def wait_for(
    condition: Callable[[], Found | None],
    process: subprocess.Popen[bytes] | None = None,
    describe: Callable[[], str] = lambda: "",
    bound_s: float = WAIT_S,
) -> Found:
    """Returns what `condition` gives once it holds; fails after `bound_s`, or when `process` has
    ended before, with the text of `describe`.
    """
    give_up, pause_s = time.monotonic() + bound_s, PAUSE_S
    while True:
        ended = process is not None and process.poll() is not None  # before the check: no race
        if found := condition():
            return found
        assert not ended, f"the process ended early {describe()}"
        assert time.monotonic() < give_up, f"not within {bound_s:g} s {describe()}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, PAUSE_S_MAX)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
