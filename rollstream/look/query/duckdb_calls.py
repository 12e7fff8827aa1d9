"""Calls of DuckDB that Ctrl-C can end, and the names of a result's columns."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import duckdb

from rollstream.printable import printable

Returned = TypeVar("Returned")
END_S = 1.0  # how long an interrupted query may take to end
_EXIT_INTERRUPTED = 130


def interruptibly(connection: duckdb.DuckDBPyConnection, work: Callable[[], Returned]) -> Returned:
    """Returns `work()`, which uses the connection alone. At `KeyboardInterrupt` the connection is
    interrupted and the exception raised; if the work does not end within `END_S`, this ends the
    process.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    returned, raised = list[Returned](), list[BaseException]()
    ended = threading.Event()

    def record() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that asked
            raised.append(error)
        finally:
            ended.set()

    try:
        # DuckDB's C++ code does not return to Python meanwhile: in the main thread the signal would
        # be seen only afterwards.
        threading.Thread(target=record, name="query", daemon=True).start()
        ended.wait()
    except KeyboardInterrupt:
        connection.interrupt()
        if not _ends(ended):
            os._exit(_EXIT_INTERRUPTED)  # the end of the interpreter would wait for DuckDB
        raise
    if raised:
        raise raised[0]
    return returned[0]


def _ends(ended: threading.Event) -> bool:
    try:
        return ended.wait(END_S)
    except KeyboardInterrupt:  # a second Ctrl-C
        return False


def distinct_columns(names: Sequence[str]) -> tuple[str, ...]:
    """That also differ as they are printed (`printable`): a repeated one gets a number, as in
    `step`, `step_1`.
    """
    taken = {printable(name) for name in names}
    distinct, shown = list[str](), set[str]()
    for name in names:
        new, number = name, 0
        while printable(new) in shown or (number and printable(new) in taken):
            number += 1
            new = f"{name}_{number}"
        shown.add(printable(new))
        distinct.append(new)
    return tuple(distinct)
