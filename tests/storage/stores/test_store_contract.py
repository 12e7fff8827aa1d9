"""Conformance of every object store with `storage/stores/base.py`."""

import pytest

from rollstream.errors import ConfigurationError, ObjectExists, ObjectMissing, SwapLost
from rollstream.storage.stores.base import KeyRefused
from rollstream.storage.stores.connect import open_store
from tests.storage.storage_samples import in_threads
from tests.storage.stores.racing import check_won, count_up, won_keys


def test_put_then_get_returns_the_bytes_and_replaces_them(store):
    store.put("a/b", b"one")
    etag = store.put("a/b", memoryview(b"two"))
    assert store.get("a/b") == b"two"
    assert store.read("a/b") == (b"two", etag)
    stat = store.stat("a/b")
    assert (stat.key, stat.bytes, stat.etag) == ("a/b", 3, etag)


def test_empty_objects_exist(store):
    store.create("empty", b"")
    assert store.get("empty") == b""
    assert [entry.bytes for entry in store.list()] == [0]


@pytest.mark.parametrize("read", ["get", "read", "stat"])
def test_reading_what_is_not_there_is_object_missing(store, read):
    store.put("folder/object", b"x")
    for key in ("absent", "folder", "folder/object/below", "other/absent"):
        with pytest.raises(ObjectMissing, match=key):
            getattr(store, read)(key)


def test_ranges_are_half_open_and_cut_off_at_the_end(store):
    store.put("key", b"0123456789")
    assert store.get("key", 2, 5) == b"234"
    assert store.get("key", 7) == b"789"
    assert store.get("key", 8, 99) == b"89"
    assert store.get("key", 10, 12) == b""
    assert store.get("key", 99) == b""
    assert store.get("key", 4, 4) == b""


def test_create_fails_on_what_is_there_and_leaves_it(store):
    store.create("key", b"first")
    with pytest.raises(ObjectExists, match="key"):
        store.create("key", b"second")
    assert store.get("key") == b"first"


def test_swap_replaces_only_the_etag_that_was_seen(store):
    seen = store.create("key", b"one")
    newer = store.swap("key", b"two", seen)
    with pytest.raises(SwapLost, match="key"):
        store.swap("key", b"three", seen)
    assert store.read("key") == (b"two", newer)


def test_swap_of_an_absent_object_is_lost(store):
    etag = store.create("key", b"one")
    store.delete("key")
    with pytest.raises(SwapLost):
        store.swap("key", b"two", etag)
    assert list(store.list()) == []


def test_delete_twice_is_fine_and_the_key_is_free_again(store):
    store.create("a/b/c", b"x")
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.create("a/b/c", b"y")
    assert store.get("a/b/c") == b"y"


def test_many_are_deleted_at_once_absent_ones_too_and_no_other(store):
    keys = [f"a/{number}" for number in range(7)]
    for key in (*keys, "a/70", "b"):
        store.put(key, b"x")
    store.delete_all(iter([*keys, "a/absent", "absent"]))
    store.delete_all(keys)
    store.delete_all([])
    assert [entry.key for entry in store.list()] == ["a/70", "b"]


def test_list_is_ordered_by_key_and_filtered_by_prefix(store):
    for key in ("b", "a/2", "a/10", "a/1/x", "a.b", "ab"):
        store.put(key, key.encode())
    assert [entry.key for entry in store.list()] == ["a.b", "a/1/x", "a/10", "a/2", "ab", "b"]
    assert [entry.key for entry in store.list("a/1")] == ["a/1/x", "a/10"]
    assert [(entry.key, entry.bytes) for entry in store.list("b")] == [("b", 1)]
    assert list(store.list("none/")) == []


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        ".",
        "a/.",
        "a b",
        "a\n",
        "a\\b",
        "~x",
        "é",
        "a" * 256,
    ],
)
def test_bad_keys_are_refused_by_every_method(store, key):
    for call in (
        lambda: store.put(key, b""),
        lambda: store.create(key, b""),
        lambda: store.swap(key, b"", ""),
        lambda: store.get(key),
        lambda: store.stat(key),
        lambda: store.read(key),
        lambda: store.delete(key),
        lambda: store.delete_all(["a", key]),
    ):
        with pytest.raises(KeyRefused):
            call()
    assert list(store.list()) == []


@pytest.mark.parametrize("prefix", ["../", "/", "a//", "a/../", "~locks"])
def test_bad_prefixes_are_refused(store, prefix):
    with pytest.raises(KeyRefused):
        store.list(prefix)


def test_create_race_of_threads_has_exactly_one_winner(store):
    check_won(store, in_threads(8, lambda number: won_keys(store, number, 20)), 20)


def test_swap_race_of_threads_loses_no_increment(store):
    store.create("count", b"0")
    in_threads(8, lambda _: count_up(store, 10))
    assert store.get("count") == b"80"


def test_deletes_that_empty_a_folder_do_not_break_creates_in_it(store):
    def work(number):
        for turn in range(30):
            store.create(f"deep/folder/{number}-{turn}", b"x")
            store.delete(f"deep/folder/{number}-{turn}")

    in_threads(4, work)
    assert list(store.list()) == []


@pytest.mark.parametrize("url", ["s4://bucket", "file:", "runs/store", "memory:", ""])
def test_an_unknown_store_url_names_the_known_ones(url):
    with pytest.raises(ConfigurationError, match="file:FOLDER, s3:"):
        open_store(url)


def test_open_store_opens_the_folder_of_its_url(tmp_path):
    open_store(f"file:{tmp_path}/x").put("a", b"1")
    assert (tmp_path / "x" / "a").read_bytes() == b"1"
