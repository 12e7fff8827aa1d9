"""The reader of a store that may come from somebody else (`storage/stores/read_only.py`): as
`FileStore` for what is inside its folder, and nothing outside of it.
"""

import os

import pytest

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ObjectMissing, OutsideRun, ReadOnly, RollstreamError
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.read_only import FolderReader, StoreReader

KEYS = ("a", "archive/topic=x/1", "archive/topic=x/2", "weights/latest.json")


@pytest.fixture
def folder(tmp_path):
    store = FileStore(tmp_path / "store")
    for key in KEYS:
        store.put(key, f"<{key}>".encode())
    return tmp_path / "store"


def test_a_folder_is_read_as_its_store_reads_it(folder):
    reader, store = FolderReader(ContainedFolder(folder)), FileStore(folder)
    for prefix in ("", "a", "archive/", "archive/topic=x/2", "none/"):
        assert list(reader.list(prefix)) == list(store.list(prefix))
    for key in KEYS:
        assert reader.read(key) == store.read(key)
        assert reader.stat(key) == store.stat(key)
        assert reader.get(key, 1, 3) == store.get(key, 1, 3)
        assert reader.path(key).read_bytes() == store.get(key)
    for key in ("none", "archive", "a/below"):
        with pytest.raises(ObjectMissing):
            reader.get(key)


def test_reading_makes_nothing(tmp_path, folder):
    before = sorted(tmp_path.rglob("*"))
    list(FolderReader(ContainedFolder(folder)).list())
    reader = FolderReader(ContainedFolder(tmp_path / "missing"))
    assert list(reader.list()) == []
    with pytest.raises(ObjectMissing):
        reader.get("a")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_every_write_is_refused(folder, kind):
    below = FileStore(folder)
    reader = StoreReader(below) if kind == "store" else FolderReader(ContainedFolder(folder))
    for write in (
        lambda: reader.put("a", b"x"),
        lambda: reader.create("b", b"x"),
        lambda: reader.swap("a", b"x", ""),
        lambda: reader.delete("a"),
        lambda: reader.delete_all(["a"]),
    ):
        with pytest.raises(ReadOnly, match="opened for reading"):
            write()
    assert reader.get("a") == b"<a>"


def test_a_link_out_of_the_folder_is_refused_by_name_until_it_is_named(tmp_path, folder):
    (folder / "archive").rename(tmp_path / "larger-disk")
    (folder / "archive").symlink_to(tmp_path / "larger-disk")
    reader = FolderReader(ContainedFolder(folder))
    for read in (lambda: reader.get("archive/topic=x/1"), lambda: list(reader.list())):
        with pytest.raises(OutsideRun, match=r"rollstream trust .* --folder .*larger-disk"):
            read()
    named = FolderReader(ContainedFolder(folder, lambda: [tmp_path / "larger-disk"]))
    assert [entry.key for entry in named.list()] == list(KEYS)
    assert named.get("archive/topic=x/1") == b"<archive/topic=x/1>"


def test_a_link_inside_the_folder_is_followed_and_a_loop_ends(folder):
    (folder / "again").symlink_to(folder / "archive")
    (folder / "archive" / "loop").symlink_to(folder)
    reader, store = FolderReader(ContainedFolder(folder)), FileStore(folder)
    listed = [entry.key for entry in reader.list()]
    assert listed == sorted({*KEYS, "again/topic=x/1", "again/topic=x/2"})
    assert listed == [entry.key for entry in store.list()]


def test_a_store_whose_part_was_moved_and_linked_lists_the_union_of_its_prefixes(tmp_path, folder):
    (folder / "archive").rename(tmp_path / "larger-disk")
    (folder / "archive").symlink_to(tmp_path / "larger-disk")
    store = FileStore(folder)
    assert [entry.key for entry in store.list()] == list(KEYS)
    assert [entry.key for entry in store.list("archive/")] == list(KEYS[1:3])


@pytest.mark.parametrize("what", ["pipe", "device", "loop"])
def test_what_is_no_regular_file_is_not_opened(folder, what):
    place = folder / "odd"
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if what == "device" else place)
    with pytest.raises(RollstreamError, match=r"odd|zero"):
        FolderReader(ContainedFolder(folder)).get("odd")


def test_opening_a_store_removes_only_its_own_leftovers(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "~writing").symlink_to(tmp_path / "project")
    linked = [tmp_path / "project" / name for name in ("notes.txt", "0" * 32)]
    (tmp_path / "other" / "~writing").mkdir(parents=True)
    kept = tmp_path / "other" / "~writing" / "notes.txt"
    leftover = tmp_path / "other" / "~writing" / ("0" * 32)
    for path in (*linked, kept, leftover):
        path.write_text("user")
        os.utime(path, (0, 0))
    FileStore(tmp_path / "store")
    FileStore(tmp_path / "other")
    assert [path.exists() for path in (*linked, kept, leftover)] == [True, True, True, False]
