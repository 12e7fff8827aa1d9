"""A topic is read from its first record on, however much of it was truncated (invariant 11)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.log_view import POLLED_ROWS, LogView
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.stores.file import FileStore
from rollstream.streams.fence import position_before, truncate
from rollstream.streams.records import Fence, GroupClosed
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter

RUN = "tiny"


@pytest.fixture
def bus(tmp_path: Path):
    opened = SqliteBus(tmp_path / "bus")
    opened.create(catalogue())
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"))


def archive(bus, store: FileStore, first: int, last: int) -> None:
    messages = bus.read("ledger", {0: first}, records_max=last - first + 1)
    fence = Fence(1, first) if first else Fence()
    data = encode_file("ledger", messages, fence).data
    store.create(archive_key("ledger", RUN, 0, first, messages[0].timestamp_ms), data)


def group_of(records: Iterator[LogRecord]) -> Iterator[int]:
    for one in records:
        assert isinstance(one.record, GroupClosed)
        yield one.record.group


def groups(bus, store: FileStore) -> list[int]:
    return list(group_of(LogView(bus, store, RUN).topic("ledger").records()))


def test_each_record_once_from_archive_and_log_wherever_the_log_begins(bus, store):
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    at = writer.append([(str(n), GroupClosed(n, "filtered", "", 1)) for n in range(9)])
    assert groups(bus, store) == list(range(9))
    archive(bus, store, 0, 3)
    archive(bus, store, 4, 6)
    assert groups(bus, store) == list(range(9))
    for gone in (2, 4, 6):  # inside the first file, between two files, inside the second
        truncate(bus, "ledger", {0: position_before(bus, "ledger", at[gone])})
        assert bus.begin("ledger") == {0: at[gone].offset}
        assert groups(bus, store) == list(range(9))


def test_records_truncated_while_they_are_read_come_from_the_archive(bus, store):
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    at = writer.append([(str(n), GroupClosed(n, "filtered", "", 1)) for n in range(3000)])
    archive(bus, store, 0, 2900)
    reading = group_of(LogView(bus, store, RUN).topic("ledger").records())
    found = [next(reading) for _ in range(10)]
    truncate(bus, "ledger", {0: position_before(bus, "ledger", at[2500])})
    assert found + list(reading) == list(range(3000))


def test_a_follower_takes_a_large_archived_file_a_bounded_number_of_records_at_a_time(bus, store):
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    writer.append([(str(n), GroupClosed(n, "filtered", "", 1)) for n in range(3000)])
    archive(bus, store, 0, 3000)
    reader = LogView(None, store, RUN).topic("ledger")
    polled = list(iter(lambda: reader.poll(4096), []))
    assert max(map(len, polled)) <= POLLED_ROWS
    records = [one for found in polled for one in found if one.kind == "records"]
    assert list(group_of(iter(records))) == list(range(3000))
