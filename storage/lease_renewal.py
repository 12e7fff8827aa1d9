"""Renews a lease in the background (`LeaseRenewal`)."""

import logging
import threading
import time
from collections.abc import Callable

from rollstream.errors import Fenced, StoreError
from rollstream.storage.leases import Lease

log = logging.getLogger(__name__)


def renew_once(lease: Lease, held_s: float, clock: Callable[[], float]) -> float:
    """Renews once; returns the time of the last successful renewal, `held_s` if the store failed.
    Raises `Fenced` if another process has the role, or if no renewal has succeeded for the lease's
    duration.
    """
    now = clock()  # before the swap, so not later than any candidate can see the renewal
    try:
        lease.renew()
    except StoreError as error:
        if clock() - held_s < lease.duration_s:
            return held_s
        raise Fenced(
            f"role {lease.role} of term {lease.term} could not be renewed for {lease.duration_s} s"
            f" ({error}); another process may hold it"
        ) from error
    return now


class LeaseRenewal:
    """Renews a lease in the background, every third of its duration. If another process has the
    role, after an unexpected error, or if the store fails for the whole duration, `lost` is set and
    `on_lost` called once: the holder must stop. Leaving the block does not release the lease.
    """

    def __init__(
        self,
        lease: Lease,
        on_lost: Callable[[Fenced], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost = threading.Event()
        self._lease = lease
        self._on_lost = on_lost
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"renew-{lease.role}", daemon=True)

    def __enter__(self) -> "LeaseRenewal":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        held_s = self._clock()
        try:
            while not self._stop.wait(self._lease.duration_s / 3):
                held_s = renew_once(self._lease, held_s, self._clock)
        except Fenced as error:
            self._lose(error)
        except Exception as error:  # the thread ends here, so the role must not be held silently
            log.exception("the lease of role %s could not be renewed", self._lease.role)
            self._lose(
                Fenced(
                    f"role {self._lease.role} of term {self._lease.term} is no longer renewed "
                    f"({type(error).__name__}: {error}); another process may hold it"
                )
            )

    def _lose(self, why: Fenced) -> None:
        self.lost.set()
        if self._on_lost is not None:
            self._on_lost(why)
