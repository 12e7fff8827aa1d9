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

VARIABLE = "ROLLSTREAM_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.5


def end_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """From here on this process does not outlive the one named by `ROLLSTREAM_PARENT`."""
    parent = environment.get(VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()
    if os.getppid() != int(parent):  # it died before we asked
        _end()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
