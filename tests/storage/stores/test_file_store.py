"""Promises of the file store alone: several processes, `kill -9`, disks that fail, permissions."""

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollstream.errors import ObjectMissing, StoreError
from rollstream.storage.stores.file import LEFTOVER_AGE_S, FileStore
from tests.storage.stores.racing import check_races_of_processes

START = (
    "import sys, os; from rollstream.storage.stores.file import FileStore; "
    "store = FileStore(sys.argv[1])\n"
)


def python(script, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", START + script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_races_of_processes_have_one_winner_per_create_and_lose_no_swap(tmp_path):
    check_races_of_processes(f"file:{tmp_path}", count=3, keys=40, turns=30)


def test_a_reader_never_sees_half_of_a_write_of_killed_writers(tmp_path):
    script = """
import itertools
print("ready", flush=True)
for n in itertools.count():
    data = bytes([n % 251]) * 300_000
    store.put("put", data)
    store.create(f"made/{os.getpid()}-{n % 50}", data) if n < 50 else None
    store.swap("swapped", data, store.read("swapped")[1])
"""
    store = FileStore(tmp_path)
    store.create("swapped", b"\0" * 300_000)
    for _ in range(6):
        writer = python(script, tmp_path)
        writer.stdout.readline()  # pyright: ignore[reportOptionalMemberAccess]
        for _ in range(100):
            for key in ("swapped", "put"):
                data = read_or_empty(store, key)
                assert data == data[:1] * len(data)
                assert len(data) in (0, 300_000)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    made = list(store.list("made/"))
    assert made
    assert {entry.bytes for entry in made} == {300_000}


def read_or_empty(store, key):
    try:
        return store.get(key)
    except ObjectMissing:
        return b""


def test_a_killed_holder_of_a_lock_does_not_stop_others(tmp_path):
    script = """
with store._locks.hold("key"):
    print("held", flush=True)
    sys.stdin.read()
"""
    store = FileStore(tmp_path)
    holder = python(script, tmp_path, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"  # pyright: ignore[reportOptionalMemberAccess]
    holder.kill()
    holder.communicate()
    store.put("key", b"free")
    assert store.get("key") == b"free"


def test_leftovers_are_invisible_and_removed_at_open_once_they_are_old(tmp_path):
    FileStore(tmp_path).put("key", b"x")
    old, young = (tmp_path / "~writing" / (digit * 32) for digit in "01")
    for path in (old, young):
        path.write_bytes(b"half")
    long_ago = young.stat().st_mtime - 2 * LEFTOVER_AGE_S
    os.utime(old, (long_ago, long_ago))
    store = FileStore(tmp_path)
    assert [entry.key for entry in store.list()] == ["key"]
    assert (old.exists(), young.exists()) == (False, True)


def test_a_write_leaves_no_other_file_than_the_object(tmp_path):
    store = FileStore(tmp_path)
    store.put("a/b", b"1")
    store.create("a/c", b"2")
    store.swap("a/b", b"3", store.stat("a/b").etag)
    assert list((tmp_path / "~writing").iterdir()) == []
    store.delete("a/b")
    store.delete("a/c")
    assert not (tmp_path / "a").exists()


def test_objects_have_the_permissions_of_the_umask(tmp_path):
    script = "os.umask(0o027); store.put('a/b', b'x')"
    assert python(script, tmp_path).wait() == 0
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o640


def test_a_file_that_is_full_is_a_clear_error_and_keeps_what_was_there(tmp_path):
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.put("key", b"x" * 5000)
except OSError as error:
    print(type(error).__name__, error)
"""
    store = FileStore(tmp_path)
    store.put("key", b"before")
    output = python(script, tmp_path).communicate()[0]
    assert output.startswith("StoreError cannot write")
    assert "File too large; no file may grow larger here" in output
    assert store.get("key") == b"before"
    assert list((tmp_path / "~writing").iterdir()) == []


def test_a_read_only_store_serves_reads_and_refuses_writes_clearly():
    script = """
if os.getuid() == 0:
    os.setuid(65534)
store = FileStore(sys.argv[1])
print(store.get("key").decode())
for write in (lambda: store.put("key", b"2"), lambda: store.delete("key")):
    try:
        write()
    except OSError as error:
        print(type(error).__name__, error)
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = Path(folder, "store")
        FileStore(root).put("key", b"1")
        for path in (root / "~writing", root):
            path.chmod(0o555)
        lines = python(script, root).communicate()[0].splitlines()
        root.chmod(0o755)
    assert lines[0] == "1"
    assert len(lines) == 3
    assert all(line.startswith("StoreError") and "may write to" in line for line in lines[1:])


def test_a_key_below_an_object_is_refused_with_the_reason(tmp_path):
    store = FileStore(tmp_path)
    store.put("a", b"x")
    with pytest.raises(StoreError, match="in the way"):
        store.create("a/b", b"y")
    store.delete("a/b")
    assert store.get("a") == b"x"


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot open"):
        FileStore(tmp_path / "file")


def test_sync_full_keeps_the_contract(tmp_path):
    store = FileStore(tmp_path, sync="full")
    etag = store.create("a/b/c", b"1")
    store.swap("a/b/c", b"2", etag)
    assert FileStore(tmp_path).get("a/b/c") == b"2"


def test_a_file_system_without_hard_links_is_named(tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(source), None, target)

    monkeypatch.setattr(os, "link", link)
    store = FileStore(tmp_path)
    with pytest.raises(StoreError, match=r"has no hard links .*: choose a folder on another one"):
        store.create("a", b"1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
