"""A witness outside of the run, which writes to the same broker and bucket all the while: every
write acknowledged to it must be there afterwards.
"""

import threading
from types import TracebackType

from rollstream.errors import BusError, StoreError
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.topics import Topic
from testbed.waiting import WAIT_S

TOPIC = "witness"
PAUSE_S = 0.05
VALUE = bytes(2000)


class Witness:
    """Appends and creates by number while its `with` block runs; closes the bus at the end."""

    def __init__(self, bus: Bus, store: ObjectStore) -> None:
        self._bus, self._store = bus, store
        self._stop = threading.Event()
        self.appended: list[int] = []
        self.created: list[int] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=each, daemon=True)
            for each in ((self._append, self.appended), (self._create, self.created))
        ]

    def __enter__(self) -> "Witness":
        self._bus.create([Topic(TOPIC)])
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        if kind is not None:
            self._bus.close()

    def assert_nothing_is_lost(self) -> None:
        """Every acknowledged write is there, with its bytes."""
        found: set[int] = set()
        position, end = 0, self._bus.end(TOPIC)[0]
        while position < end:
            messages = self._bus.read(TOPIC, {0: position}, wait_s=5.0)
            assert messages, f"nothing at {position} of {end}"
            assert all(one.value and one.value.endswith(VALUE) for one in messages)
            found |= {int((one.value or b"").removesuffix(VALUE)) for one in messages}
            position = messages[-1].offset + 1
        assert self.appended
        assert self.created
        assert set(self.appended) <= found
        assert all(self._store.get(f"witness/{n}") == b"%d" % n + VALUE for n in self.created)
        self._bus.close()

    def _repeat(self, act, acknowledged: list[int]) -> None:
        number = 0
        while not self._stop.wait(PAUSE_S):
            try:
                act(number)
            except (BusError, StoreError):
                pass  # the write was not acknowledged
            else:
                acknowledged.append(number)
            number += 1

    def _append(self, number: int) -> None:
        self._bus.append(TOPIC, [AppendEntry(b"k", b"%d" % number + VALUE)])

    def _create(self, number: int) -> None:
        self._store.create(f"witness/{number}", b"%d" % number + VALUE)
