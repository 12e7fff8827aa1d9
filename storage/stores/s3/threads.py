"""Runs the same work on many pieces in parallel; the first failure cancels those not yet
started.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from typing import TypeVar

_P = TypeVar("_P")
_T = TypeVar("_T")


def run_in_parallel(pool: Executor, work: Callable[[_P], _T], pieces: Sequence[_P]) -> list[_T]:
    """The results of `work` for each piece, in order. Raises the failure of one of them.

    No piece is still running when it returns or raises.
    """
    futures = [pool.submit(work, piece) for piece in pieces]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]
