"""vLLM's process ends with the rollout that started it, also by `kill -9`: it would go on computing
for nobody, and keep its memory.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.5


def end_with_parent() -> None:
    """From here on; nothing where this is no process that another one of Python started."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent.pid,), daemon=True).start()
    if os.getppid() != parent.pid:  # it died before we asked
        _end()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
