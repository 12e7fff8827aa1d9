"""Truncated answers are read from the archive into the history; an unreadable archive costs drafts,
not the rollout.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.producers.drafts.feed import HistoryFeed
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.file import FileStore
from rollstream.streams.bus import Bus
from rollstream.streams.records import Fence
from rollstream.streams.topics import partition_of
from tests.drafts.drafts_log import answer, append_records, asked, guessed, log_in

RUN, GROUP = "tiny", 7
PARTITION_KEY = str(GROUP).encode()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    bus = log_in(tmp_path)
    yield bus
    bus.close()


def archived(bus: Bus, store: FileStore) -> str:
    """Two answers, the first of them archived and truncated; returns the file's key."""
    append_records(bus, answer(GROUP, [4, 5, 6, 7]), answer(GROUP, [4, 5, 6, 8, 9]))
    partition = partition_of(PARTITION_KEY, bus.partitions("trajectories"))
    (message,) = bus.read("trajectories", {partition: 0}, records_max=1)
    key = archive_key("trajectories", RUN, partition, 0, message.timestamp_ms)
    store.create(key, encode_file("trajectories", [message], Fence()).data)
    bus.truncate("trajectories", {partition: 1})
    return key


def open_feed(bus: Bus, store: FileStore) -> HistoryFeed:
    memory = HistoryFeed(bus, LogView(bus, store, RUN), AnswerHistory(4096))
    for _ in range(3):
        memory.poll()
    return memory


def test_an_answer_that_is_only_archived_is_drafted_from(tmp_path: Path, bus: Bus) -> None:
    store = FileStore(str(tmp_path / "store"))
    archived(bus, store)
    memory = open_feed(bus, store)
    assert memory.records == 2
    assert guessed(memory.history.view, GROUP, [5, 6, 7]) == []
    assert guessed(memory.history.view, GROUP, [4, 5, 6]) in ([7], [8, 9])


def test_behind_a_damaged_archive_what_the_log_keeps_is_drafted_from(
    tmp_path: Path, bus: Bus
) -> None:
    store = FileStore(str(tmp_path / "store"))
    key = archived(bus, store)
    store.put(key, b"PAR1 and no more")
    memory = open_feed(bus, store)
    assert memory.records == 1
    assert guessed(memory.history.view, GROUP, asked(GROUP)) == [4, 5, 6, 8, 9]
    append_records(bus, answer(GROUP + 1, [9, 9, 3]))
    memory.poll()
    assert guessed(memory.history.view, GROUP + 1, asked(GROUP + 1)) == [9, 9, 3]
