"""Detects that a run is complete, and ends a role that would serve it for ever
(`--until-complete`), for orchestrators that start a role again unless it exits with 0. Two objects
of the store decide, so no record of a topic of many writers can end a role.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rollstream.errors import StoreError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import read_role
from rollstream.storage.weights.pointer import believed_pointer

log = logging.getLogger(__name__)

# Between two looks: one GET each until the last version is believed, then two.
POLL_S = 5.0
# A role that stops last reads the last records of the others, which look every `POLL_S`.
LAST_S = 30.0


def is_complete(store: ObjectStore, steps: int) -> bool:
    """The version of step `steps` is believed and the trainer has released its lease."""
    pointer = believed_pointer(store)
    if pointer is None or pointer.version is None or pointer.version.number < steps:
        return False
    # The trainer releases its lease after its last record and checkpoint: even a successor would
    # have nothing to train.
    trainer = read_role(store, "trainer")
    return trainer is not None and trainer[0].released


@contextmanager
def stop_when_complete(
    ask: Callable[[], bool],
    stop: threading.Event,
    stops_last: bool,
    pause_s: float = POLL_S,
    last_s: float = LAST_S,
) -> Generator[threading.Event]:
    """Asks in a thread while the block runs; then sets the yielded event and `stop`, for a role
    that `stops_last` after `last_s`. A store that cannot be read is asked again.
    """
    complete, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(pause_s):
            try:
                if not ask():
                    continue
            except StoreError as error:
                log.warning("whether the run is complete could not be read: %s", error)
                continue
            if not (stops_last and ended.wait(last_s)):
                log.info("the run is complete")
                complete.set()
                stop.set()
            return

    thread = threading.Thread(target=watch, name="completion", daemon=True)
    thread.start()
    try:
        yield complete
    finally:
        ended.set()
