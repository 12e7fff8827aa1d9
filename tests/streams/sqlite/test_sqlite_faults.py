"""Faults around the bus's files: a clear error each time, and no acknowledged record lost."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import BusError, ConfigurationError
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.database import network_file_system
from rollstream.streams.topics import Topic
from testbed.waiting import WAIT_S
from tests.streams.sqlite.test_sqlite_processes import start

MOUNTS = r"""
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local\040disk ext4 rw 0 0
//server/share /mnt/share cifs rw 0 0
me@host: /mnt/ssh fuse.sshfs rw 0 0
/dev/fuse /mnt/fuse fuse.ntfs rw 0 0
/dev/vdc /twice ext4 rw 0 0
server:/twice /twice nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("/var/runs", None),
        ("/home/me/runs", "nfs4"),
        ("/home", "nfs4"),
        ("/homework", None),
        ("/home/local disk/runs", None),
        ("/mnt/share/x", "cifs"),
        ("/mnt/ssh", "fuse.sshfs"),
        ("/mnt/fuse", None),
        ("/twice/x", "nfs"),
    ],
)
def test_the_longest_mount_point_decides_the_file_system(folder: str, found: str | None) -> None:
    assert network_file_system(folder, MOUNTS) == found
    assert network_file_system(folder, "") is None


def test_a_folder_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr("rollstream.streams.sqlite.database.MOUNTS", mounts)
    with pytest.raises(BusError, match=r"network file system \(nfs4\).*use a local folder"):
        SqliteBus(tmp_path / "bus")


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "bus", Path("/proc/bus-of-a-test")):
        with pytest.raises(BusError, match=f"cannot make the bus's folder {folder}"):
            SqliteBus(folder)


def test_a_folder_that_cannot_be_written_is_a_clear_error() -> None:
    with pytest.raises(BusError, match=r"cannot open /proc/self/groups.db.*may write to"):
        SqliteBus(Path("/proc/self"))


FILL = """
import resource, sys
import sqlite3
from pathlib import Path
from typing import Any
from rollstream.streams.bus import AppendEntry
from rollstream.errors import BusError
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import Topic
bus = SqliteBus(Path(sys.argv[1]))
bus.create([Topic("t")])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    while True:
        print(*bus.append("t", [AppendEntry(b"k", bytes(20_000))]), flush=True)
except BusError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(*bus.append("t", [AppendEntry(b"k", b"space again")]))
"""


def test_a_full_disk_is_a_clear_error_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    filler = start(FILL, tmp_path)
    output = filler.communicate(timeout=WAIT_S)[0].splitlines()
    assert filler.returncode == 0
    *acknowledged, error, after = output
    assert "cannot append to" in error
    assert "free space" in error
    assert [int(line) for line in acknowledged] == list(range(len(acknowledged)))
    assert int(after) >= len(acknowledged)
    bus = SqliteBus(tmp_path)
    read = bus.read("t", {0: 0}, records_max=1000, bytes_max=1 << 30)
    assert [m.value for m in read[: len(acknowledged)]] == [bytes(20_000)] * len(acknowledged)
    assert read[-1].value == b"space again"
    bus.close()


def test_a_full_database_refuses_and_keeps_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def connect_with_limit(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 12").fetchone()
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_with_limit)
    bus = SqliteBus(tmp_path)
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"first")])
    with pytest.raises(BusError, match=r"SQLITE_FULL.*the disk is full: free space"):
        bus.append("t", [AppendEntry(b"k", bytes(1 << 20))])
    assert [m.value for m in bus.read("t", {0: 0})] == [b"first"]
    assert bus.append("t", [AppendEntry(b"k", b"small")]) == [1]
    bus.close()


def test_overwritten_pages_are_a_clear_error(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path)
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", bytes(1000)) for _ in range(500)])
    bus.close()
    path = tmp_path / "t.db"
    content = bytearray(path.read_bytes())
    content[16384:] = b"\xa5" * (len(content) - 16384)
    path.write_bytes(content)
    bus = SqliteBus(tmp_path)
    with pytest.raises(BusError, match=r"t\.db.*damaged.*restore it"):
        bus.read("t", {0: 0})
    bus.close()


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_bytes(b"not a database at all" * 1000)
    bus = SqliteBus(tmp_path)
    with pytest.raises(BusError, match=r"t\.db: file is not a database"):
        bus.create([Topic("t")])
    bus.close()


def test_urls_name_their_bus(tmp_path: Path) -> None:
    with_files = open_bus(f"sqlite:{tmp_path}/bus", sync="full")
    assert isinstance(with_files, SqliteBus)
    with_files.close()


@pytest.mark.parametrize("url", ["kafka:host", "sqlite:", "memory:", "runs/bus", ""])
def test_an_unknown_bus_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:FOLDER or kafka:"):
        open_bus(url)
