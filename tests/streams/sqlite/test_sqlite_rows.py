"""Records packed into rows are read back unchanged, whatever their sizes, and once committed."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rollstream.streams.bus import AppendEntry
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.topic_log import ROW_BYTES, TopicLog, pack_rows, unpack_row
from rollstream.streams.topics import Topic

ENTRIES = st.lists(
    st.builds(AppendEntry, st.binary(max_size=6), st.none() | st.binary(max_size=12)), min_size=1
)


@given(ENTRIES, st.integers(0, 1 << 40), st.integers(0, 40))
def test_what_was_packed_is_unpacked(
    entries: list[AppendEntry], first: int, row_bytes: int
) -> None:
    rows = list(pack_rows(entries, first, 17, row_bytes))
    messages = [message for row in rows for message in unpack_row("t", 2, row)]
    assert [AppendEntry(m.key, m.value) for m in messages] == entries
    assert [m.offset for m in messages] == list(range(first, first + len(entries)))
    assert all(m.topic == "t" and m.partition == 2 and m.timestamp_ms == 17 for m in messages)


@given(ENTRIES, st.integers(0, 40))
def test_a_row_of_several_is_bounded_and_holds_no_tombstone(
    entries: list[AppendEntry], row_bytes: int
) -> None:
    for _, count, _, keys, values, _ in pack_rows(entries, 0, 17, row_bytes):
        assert count == 1 or (values is not None and len(keys) + len(values) < row_bytes)


def test_every_record_of_a_large_append_is_read_from_any_position(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path)
    bus.create([Topic("t")])
    sizes = [10, ROW_BYTES // 2, ROW_BYTES // 3, ROW_BYTES // 3, 2 * ROW_BYTES, 0, 5]
    values = [bytes([index]) * size for index, size in enumerate(sizes)]
    bus.append("t", [AppendEntry(b"k%d" % index, value) for index, value in enumerate(values)])
    for offset in range(len(values) + 1):
        read = bus.read("t", {0: offset})
        assert [m.value for m in read] == values[offset:]
        assert [m.key for m in read] == [b"k%d" % n for n in range(offset, len(values))]
        assert [m.value for m in bus.read("t", {0: offset}, records_max=2)] == values[offset:][:2]
    bus.close()


def test_truncation_inside_a_row_keeps_the_row_and_survives_opening(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path)
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"%d" % number) for number in range(6)])
    bus.truncate("t", {0: 4})
    bus.close()
    bus = SqliteBus(tmp_path)
    assert (bus.begin("t"), bus.end("t")) == ({0: 4}, {0: 6})
    assert [m.value for m in bus.read("t", {0: 4})] == [b"4", b"5"]
    assert bus.append("t", [AppendEntry(b"k", b"6")]) == [6]
    bus.close()


def test_what_another_thread_committed_is_read_before_its_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that polls an empty topic sees the end of an append that is just returning."""
    bus, seen = SqliteBus(tmp_path), list[tuple[dict[int, int], int]]()
    bus.create([Topic("t")])
    assert bus.read("t", {0: 0}) == []
    commit = TopicLog.append

    def committed(log: TopicLog, entries: Sequence[AppendEntry], now_ms: int) -> list[int]:
        offsets = commit(log, entries, now_ms)
        seen.append((bus.end("t"), len(bus.read("t", {0: 0}))))
        return offsets

    monkeypatch.setattr(TopicLog, "append", committed)
    bus.append("t", [AppendEntry(b"k", b"v")])
    assert seen == [({0: 1}, 1)]
    bus.close()
