"""Writes whose answer is lost after they took effect: they count as won, exactly once, on every S3
server; and a read that crosses a swap.
"""

import pytest

from rollstream.errors import ObjectExists, SwapLost
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.s3.address import parse_s3_url
from testbed.servers.fault_proxy import Fault, FaultProxy
from tests.storage.storage_samples import in_threads
from tests.storage.stores.s3_operations import KEY, LARGE, SMALL, content


@pytest.fixture
def proxied(s3_url):
    endpoint = parse_s3_url(s3_url).endpoint
    with FaultProxy(endpoint) as proxy:  # pyright: ignore[reportArgumentType]
        yield open_store(s3_url), proxy, open_store(s3_url.replace(endpoint, proxy.endpoint))


@pytest.mark.parametrize(("kind", "value"), [("reset_after", 0), ("status_after", 500)])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_create_whose_answer_was_lost_has_won(proxied, kind, value, size):
    direct, proxy, store = proxied
    method = "PUT" if size == SMALL else "POST"
    proxy.inject(Fault(kind, value, method=method, where="" if size == SMALL else "uploadId="))
    etag = store.create(KEY, content(2, size))
    assert proxy.injected == 1
    assert direct.read(KEY) == (content(2, size), etag)
    with pytest.raises(ObjectExists):
        store.create(KEY, content(2, size))


def test_creates_in_doubt_of_rivals_have_exactly_one_winner(proxied):
    direct, proxy, store = proxied
    proxy.inject(Fault("reset_after", method="PUT", count=6))

    def create(number):
        try:
            store.create(KEY, b"%d" % number)
            return number
        except ObjectExists:
            return None

    winners = [number for number in in_threads(6, create) if number is not None]
    assert direct.get(KEY) == b"%d" % winners[0]
    assert len(winners) == 1


@pytest.mark.parametrize(("kind", "value"), [("reset_after", 0), ("status_after", 500)])
def test_a_swap_whose_answer_was_lost_has_won(proxied, kind, value):
    direct, proxy, store = proxied
    etag = direct.create(KEY, b"one")
    proxy.inject(Fault(kind, value, method="PUT"))
    swapped = store.swap(KEY, b"two", etag)
    assert direct.read(KEY) == (b"two", swapped)
    with pytest.raises(SwapLost):
        store.swap(KEY, b"three", etag)


def test_a_completion_that_conflicts_is_uploaded_again(proxied):
    direct, proxy, store = proxied
    proxy.inject(Fault("status", 409, method="POST", where="uploadId=", count=1))
    store.create(KEY, content(2, LARGE))
    opened = [request for request in proxy.requests if request.endswith("?uploads")]
    assert len(opened) == 2
    assert direct.get(KEY) == content(2, LARGE)


def test_a_create_that_meets_a_conflict_is_decided_by_a_second_request(proxied):
    direct, proxy, store = proxied
    proxy.inject(Fault("status", 409, method="PUT", count=3))
    store.create(KEY, b"x")
    assert direct.get(KEY) == b"x"


def test_a_large_read_that_crosses_a_swap_returns_one_of_the_two(proxied):
    direct, proxy, store = proxied
    direct.put(KEY, content(1, LARGE))
    proxy.inject(Fault("delay", then=lambda: direct.put(KEY, content(2, LARGE)), method="GET"))
    data, etag = store.read(KEY)
    assert data == content(2, LARGE)
    assert etag == direct.stat(KEY).etag
