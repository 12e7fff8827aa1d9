"""An archiver's world: a log that grows, a store, and boundaries at each call to either, where the
process may die or another one may run.
"""

from collections.abc import Callable
from typing import Any

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.archive.reading import archived_files, table_from
from rollstream.storage.archive.rows import classify_rows
from rollstream.storage.archive.tables import originals_of
from rollstream.streams.bus import Message
from rollstream.streams.records import Fence
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus, MemoryStore
from tests.archive.archive_samples import append_of_term

TOPIC = "admissions"
SETTINGS = ArchiveSettings(roll_bytes=400, roll_s=1000.0)  # about three records a file
NEVER = 10**9


class Killed(Exception):
    """The process ends here."""


class Boundaries:
    """Counts an archiver's calls to bus and store; at number `fatal` it calls `act`, before the
    call takes effect or after it.
    """

    def __init__(self, fatal: int, after: bool, act: Callable[[], None]) -> None:
        self.fatal, self.after, self.act = fatal, after, act
        self.calls = 0

    def wrap(self, target: Any) -> Any:
        return _Wrapped(target, self)

    def call(self, step: Callable[[], Any]) -> Any:
        here = self.calls == self.fatal
        self.calls += 1
        if here and not self.after:
            self.act()
        result = step()
        if here and self.after:
            self.act()
        return result


class _Wrapped:
    """A bus or a store whose every method is a boundary."""

    def __init__(self, target: Any, boundaries: Boundaries) -> None:
        self._target, self._boundaries = target, boundaries

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return lambda *args, **named: self._boundaries.call(lambda: method(*args, **named))


def die() -> None:
    raise Killed


class Sips(MemoryBus):
    """Returns three records a read, so that a life has several files."""

    def read(self, topic: str, positions: Any, **bounds: Any) -> list[Message]:
        return super().read(topic, positions, **bounds | {"records_max": 3})  # pyright: ignore[reportArgumentType]


class World:
    """A log of 10 records by two terms, one of them a zombie for a while, and a store."""

    def __init__(self) -> None:
        self.day = 0
        self.bus: MemoryBus = Sips(lambda: 1_763_683_200.0 + 86_400 * self.day)
        self.bus.create(catalogue(1))
        self.store = MemoryStore()
        append_of_term(self.bus, 1, 0, 4)
        append_of_term(self.bus, 2, 0, 2)
        append_of_term(self.bus, 1, 4, 2)  # void
        append_of_term(self.bus, 2, 2, 2)
        self.grown = 0

    def grow(self) -> None:
        append_of_term(self.bus, 2, 4 + self.grown, 3)
        self.grown += 3

    def archiver(self, boundaries: Boundaries, given: ArchiveSettings = SETTINGS) -> TopicArchive:
        bus, store = boundaries.wrap(self.bus), boundaries.wrap(self.store)
        return TopicArchive(bus, store, "tiny", TOPIC, given, lambda: 0.0)

    def run(self, boundaries: Boundaries, given: ArchiveSettings = SETTINGS) -> int:
        """A life from start to clean stop, or to its death; returns its calls."""
        archiver = self.archiver(boundaries, given)
        try:
            archiver.start()
            while archiver.advance():
                pass
            archiver.finish()
        except Killed:
            pass
        return boundaries.calls

    def log(self) -> list[Message]:
        return MemoryBus.read(self.bus, TOPIC, self.bus.begin(TOPIC), records_max=1000)

    def assert_exactly_once(self) -> None:
        """Rows are the log's records, in order, each once, with their bytes and with the verdict of
        their fence.
        """
        tables = [
            table_from(self.store, file) for file in archived_files(self.store, "tiny", TOPIC)
        ]
        offsets = [at for table in tables for at in table.column("offset").to_pylist()]
        wanted = self.log()
        assert offsets == [message.offset for message in wanted]
        values = [value for table in tables for value in originals_of(table, TOPIC)]
        assert values == [message.value for message in wanted]
        voids = [void for table in tables for void in table.column("void").to_pylist()]
        rows, _ = classify_rows(TOPIC, wanted, {0: Fence()})
        assert voids == [row.void for row in rows]
