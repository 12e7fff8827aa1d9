"""Deletes what nothing needs any more, beside the publisher (`DeletionThread`)."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class DeletionThread:
    """Calls `delete` in a thread of its own. One call serves all requests since the previous call
    began; its argument is True if one of these came after a checkpoint.
    """

    def __init__(self, delete: Callable[[bool], None]) -> None:
        self._delete = delete
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._is_due = self._has_checkpoint = self._is_closed = False
        self.failed: BaseException | None = None
        """The exception that ended the thread early."""
        # A thread of its own, so that no version waits for deletions.
        self._thread = threading.Thread(target=self._run, name="deletions", daemon=True)
        self._thread.start()

    def request(self, has_checkpoint: bool) -> None:
        """Requests a deletion, after a checkpoint if `has_checkpoint`; never waits."""
        with self._lock:
            self._is_due = True
            self._has_checkpoint |= has_checkpoint
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                with self._lock:
                    is_due, has_checkpoint = self._is_due, self._has_checkpoint
                    self._is_due = self._has_checkpoint = False
                if is_due:
                    self._delete(has_checkpoint)
                elif self._is_closed:
                    return
                if self._is_closed:
                    self._wake.set()
        except BaseException as error:
            log.exception("deletion failed")
            self.failed = error
