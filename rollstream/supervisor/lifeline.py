"""A role ends when the supervisor that started it does, also by `kill -9`.

The supervisor cannot do anything about its own `kill -9`, so each role asks the kernel for it as
its first act: on Linux `prctl(PR_SET_PDEATHSIG, SIGKILL)`. Elsewhere a thread looks at the parent's
process id twice a second. A role started by hand (no `ROLLSTREAM_PARENT`) is left alone.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

PARENT_VARIABLE = "ROLLSTREAM_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5


def end_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """From here on this process does not outlive the one named by `ROLLSTREAM_PARENT`."""
    parent = environment.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_poll_parent, args=(int(parent),), daemon=True).start()
    if os.getppid() != int(parent):  # it died before we asked
        _kill_self()


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
