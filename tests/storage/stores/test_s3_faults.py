"""S3 through a failing proxy: every operation ends in success or in a typed error, nothing is
half-written, nothing short or damaged is returned, and no acknowledged write is lost.
"""

import threading
from dataclasses import replace

import pytest

from rollstream.errors import (
    CorruptObject,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreTimeout,
    SwapLost,
)
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.s3.address import parse_s3_url
from testbed.servers import versity
from testbed.servers.fault_proxy import FOREVER, Fault, FaultProxy
from tests.storage.stores.s3_operations import KEY, LARGE, OPERATIONS, READS, SMALL, content
from tests.support.shares import one_of_pairs

PASSING = [
    Fault("status", 500, count=2),
    Fault("status", 503, count=2),
    Fault("status_after", 500),
    Fault("reset", count=2),
    Fault("reset_after"),
    Fault("delay", 0.05, count=4),
    Fault("blackhole", 0.3),
    Fault("truncate", 0.5, count=2),
    Fault("shorten", 0.5, count=2),
    Fault("drip", 0.1, count=4),
]
LASTING = [
    Fault("status", 500),
    Fault("status", 503),
    Fault("status_after", 500),
    Fault("reset"),
    Fault("reset_after"),
    Fault("blackhole", 3.0),
]
NAMES = {operation.name: operation for operation in OPERATIONS}


def named(one):
    if isinstance(one, Fault):
        return f"{one.kind}{one.value or ''}"
    return getattr(one, "name", one)


@pytest.fixture
def proxied():
    """(direct store, proxy, a function that opens the same prefix through the proxy)."""
    url = versity.new_url()
    endpoint = parse_s3_url(url).endpoint
    with FaultProxy(endpoint) as proxy:  # pyright: ignore[reportArgumentType]

        def through(deadline_s=60.0):
            changed = url.replace(endpoint, proxy.endpoint)  # pyright: ignore[reportArgumentType]
            return open_store(f"{changed}&deadline_s={deadline_s}")

        yield open_store(url), proxy, through


@pytest.mark.parametrize(
    ("operation", "fault"),
    one_of_pairs(OPERATIONS, PASSING),
    ids=named,
)
def test_a_passing_fault_is_survived_by_every_operation(proxied, operation, fault):
    direct, proxy, through = proxied
    operation.begin(direct)
    proxy.inject(replace(fault))
    assert operation.act(through(), content(2, operation.size))
    assert proxy.injected
    expected = "old" if operation.name in READS else "new"
    deleted = operation.name.startswith("delete")
    assert operation.present(direct) == ("nothing" if deleted else expected)


@pytest.mark.parametrize(
    ("name", "fault"),
    one_of_pairs(["get", "get_large", "stat", "put", "put_large", "create", "swap"], LASTING),
    ids=named,
)
def test_a_lasting_fault_is_a_typed_error_and_nothing_is_half_written(proxied, name, fault):
    direct, proxy, through = proxied
    operation = NAMES[name]
    operation.begin(direct)
    store = through(0.4)
    proxy.inject(replace(fault, count=FOREVER))
    with pytest.raises(StoreTimeout, match=f"{KEY} at .*until its deadline"):
        operation.act(store, content(2, operation.size))
    proxy.clear()
    before = {"old"} if operation.old else {"nothing"}
    assert operation.present(direct) in (before if name in READS else before | {"new"})


@pytest.mark.parametrize("kind", ["truncate", "shorten"])
@pytest.mark.parametrize("name", ["get", "get_large", "get_range"])
def test_bodies_that_are_always_short_are_never_returned(proxied, kind, name):
    direct, proxy, through = proxied
    operation = NAMES[name]
    operation.begin(direct)
    proxy.inject(Fault(kind, 0.9, count=FOREVER))
    with pytest.raises(StoreTimeout):
        operation.act(through(0.8), b"")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_damage_on_the_way_is_read_again_and_damage_that_stays_is_named(proxied, size):
    direct, proxy, through = proxied
    direct.put(KEY, content(1, size))
    store = through()
    proxy.inject(Fault("corrupt", method="GET"))
    assert store.get(KEY) == content(1, size)
    proxy.inject(Fault("corrupt", method="GET", count=FOREVER))
    with pytest.raises(CorruptObject, match=KEY):
        store.read(KEY)


def test_an_outage_shorter_than_the_deadline_is_waited_for(proxied):
    direct, proxy, through = proxied
    store = through(20.0)
    for kind in ("reset", "status", "blackhole"):
        proxy.inject(Fault(kind, 503 if kind == "status" else 1.0, count=FOREVER))
        end = threading.Timer(1.0, proxy.clear)
        end.start()
        store.put(KEY, kind.encode())
        end.join()
        assert direct.get(KEY) == kind.encode()


def test_a_body_that_drips_longer_than_the_deadline_is_given_up(proxied):
    direct, proxy, through = proxied
    direct.put(KEY, content(1, SMALL))
    proxy.inject(Fault("drip", 4.0, method="GET", count=FOREVER))
    with pytest.raises(StoreTimeout, match="did not come in time"):
        through(2.0).get(KEY)


def test_a_killed_server_loses_nothing_that_was_acknowledged_and_the_writer_continues(monkeypatch):
    with_data = versity.VersityGW()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", with_data.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", with_data.secret_key)
    try:
        with_data.start()
        with_data.make_bucket("kept")
        store = open_store(f"s3://kept/run?endpoint={with_data.endpoint}&deadline_s=40")
        acknowledged = []

        def write():
            for number in range(60):
                store.create(f"object/{number}", b"%d" % number * 1000)
                acknowledged.append(number)

        writer = threading.Thread(target=write)
        writer.start()
        for turn in (1, 2):
            while len(acknowledged) < 15 * turn:
                threading.Event().wait(0.005)
            with_data.stop()
            with_data.start()
        writer.join()
        assert acknowledged == list(range(60))
        assert all(store.get(f"object/{n}") == b"%d" % n * 1000 for n in acknowledged)
    finally:
        with_data.close()


def test_an_upload_that_fails_is_aborted_once_the_server_can_be_reached(proxied):
    direct, proxy, through = proxied
    proxy.inject(Fault("status", 500, method="PUT", count=FOREVER))
    with pytest.raises(StoreTimeout):
        through(0.8).put(KEY, content(1, LARGE))
    assert any(request.startswith("DELETE") for request in proxy.requests)
    with pytest.raises(ObjectMissing):
        direct.get(KEY)


def test_a_refusal_is_not_tried_again(proxied):
    _, proxy, through = proxied
    store = through()
    proxy.inject(Fault("status", 403, count=FOREVER))
    with pytest.raises(StoreError) as caught:
        store.put(KEY, b"x")
    assert not isinstance(caught.value, StoreTimeout)
    assert len(proxy.requests) == 1


def test_another_writer_between_an_in_doubt_swap_and_its_repetition_is_not_overwritten(proxied):
    direct, proxy, through = proxied
    etag = direct.create(KEY, b"0")
    rival = Fault("reset_after", then=lambda: direct.swap(KEY, b"2", direct.stat(KEY).etag))
    store = through()
    proxy.inject(rival)
    with pytest.raises(SwapLost):
        store.swap(KEY, b"1", etag)
    assert direct.get(KEY) == b"2"


def test_a_rivals_create_is_not_taken_for_the_own_one(proxied):
    direct, proxy, through = proxied
    direct.create(KEY, b"same bytes")
    proxy.inject(Fault("reset_after"))
    with pytest.raises(ObjectExists):
        through().create(KEY, b"same bytes")
