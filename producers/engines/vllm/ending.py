"""Ends vLLM's process together with the rollout that started it, also after `kill -9`: otherwise it
would keep computing and keep its memory.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5


def end_with_parent() -> None:
    """End this process when its parent ends; does nothing if Python's multiprocessing did not start
    it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent.pid,), daemon=True).start()
    if os.getppid() != parent.pid:  # the parent died before the call above
        _end()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
