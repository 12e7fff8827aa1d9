"""Tells that a run is complete (`is_complete`), and ends a role that would serve it for ever
(`stop_when_complete`, the option `--until-complete`).

It is for runs without a supervisor: an orchestrator that starts a role again unless it exits with 0
then ends all of them with the run. Two small objects of the store decide, so that no record of a
topic of many writers can end a role.
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

POLL_S = 5.0
"""Between two looks: one GET each until the last version is believed, then two."""
LAST_S = 30.0
"""How much later a role stops that stops last, because it reads the last records of the others,
which look every `POLL_S`.
"""


def is_complete(store: ObjectStore, steps: int) -> bool:
    """Returns whether the version of step `steps` is believed and the trainer has released its
    lease. It releases it after its last record and its last checkpoint, so nothing of the run is
    left to train, not even for a successor.
    """
    pointer = believed_pointer(store)
    if pointer is None or pointer.version is None or pointer.version.number < steps:
        return False
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
    """While the block runs, ask in a thread whether the run is complete; once it is, set the
    yielded event and then `stop`, for a role that `stops_last` after `last_s`. A store that cannot
    be read is logged and asked again.
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
