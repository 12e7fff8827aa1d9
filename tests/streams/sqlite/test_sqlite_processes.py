"""The embedded bus between real processes, one of which is killed in the middle of its work."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.errors import BusError
from rollstream.streams.bus import AppendEntry
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import Topic
from testbed.repository import ROOT
from testbed.waiting import WAIT_S
from tests.streams.forked_child import check_that_a_forked_child_is_refused

APPEND = """
import sys
from pathlib import Path
from rollstream.streams.bus import AppendEntry
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import Topic
folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
bus = SqliteBus(folder)
bus.create([Topic("t", 2)])
for number in range(count):
    entry = AppendEntry(name.encode(), b"%d" % number + bytes(3000), number % 2)
    print(number, *bus.append("t", [entry]), flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_several_processes_create_and_append_at_once(tmp_path: Path) -> None:
    writers = [start(APPEND, tmp_path, f"w{n}", 100) for n in range(3)]
    assert [writer.wait(WAIT_S) for writer in writers] == [0, 0, 0]
    bus = SqliteBus(tmp_path)
    messages = bus.read("t", {0: 0, 1: 0})
    assert bus.end("t") == {0: 150, 1: 150}
    for name in (b"w0", b"w1", b"w2"):
        for partition in (0, 1):
            mine = [m for m in messages if m.key == name and m.partition == partition]
            numbers = [int((m.value or b"").rstrip(b"\0")) for m in mine]
            assert numbers == list(range(partition, 100, 2))
    bus.close()


def test_a_reader_follows_a_writer_in_another_process(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path)
    bus.create([Topic("t", 2)])
    writer = start(APPEND, tmp_path, "w", 20)
    positions, read = {0: 0, 1: 0}, 0
    while read < 20:
        messages = bus.read("t", positions, wait_s=30)
        assert messages
        read += len(messages)
        for message in messages:
            positions[message.partition] = message.offset + 1
    assert writer.wait(WAIT_S) == 0
    bus.close()


def test_all_that_a_killed_writer_had_acknowledged_is_there(tmp_path: Path) -> None:
    writer = start(APPEND, tmp_path, "w", 1_000_000)
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(40)]
    os.kill(writer.pid, signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.wait(WAIT_S)
    acknowledged = [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]
    bus = SqliteBus(tmp_path)
    there = {
        (message.partition, message.offset): int((message.value or b"").rstrip(b"\0"))
        for message in bus.read("t", {0: 0, 1: 0}, records_max=1_000_000, bytes_max=1 << 30)
    }
    assert all(there[number % 2, offset] == number for number, offset in acknowledged)
    assert set(range(bus.end("t")[0])) == {offset for partition, offset in there if not partition}
    assert bus.append("t", [AppendEntry(b"w", b"next", 0)]) == [bus.end("t")[0] - 1]
    bus.close()


def test_a_forked_child_is_refused_with_what_to_do(tmp_path: Path) -> None:
    check_that_a_forked_child_is_refused(SqliteBus(tmp_path))


def test_records_survive_closing_and_opening(tmp_path: Path) -> None:
    for number in range(3):
        bus = SqliteBus(tmp_path, sync="full" if number else "normal")
        bus.create([Topic("t")])
        assert bus.append("t", [AppendEntry(b"k", b"%d" % number)]) == [number]
        bus.close()


@pytest.mark.parametrize("name", ["", "../t", "a/b", "groups", ".hidden"])
def test_a_topic_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    bus = SqliteBus(tmp_path)
    with pytest.raises(BusError, match="cannot name a topic"):
        bus.create([Topic(name)])
    bus.close()
