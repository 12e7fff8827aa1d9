"""What a process's metrics say of its log and its store: durations, bytes, retries, doubt."""

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.errors import BusTimeout, ObjectExists, RecordTooLarge, StoreTimeout
from rollstream.metric_values import MetricHistogram, MetricValue
from rollstream.run.metrics.endpoint import ProcessMetrics, serve_metrics
from rollstream.run.metrics.metered import MeteredBus, MeteredStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import AppendEntry
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.connect import open_bus
from rollstream.streams.kafka.admin import RetryingAdmin
from rollstream.streams.topics import catalogue
from testbed.scraping import endpoint, scrape, value
from tests.metrics.test_endpoint import PLAIN

ENTRY = AppendEntry(b"key", b"value", 0)


class Lossy(BusWrapper):
    """Loses the answer to every append."""

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        super().append(topic, entries)
        raise BusTimeout("no answer")


def counted(found: MetricValue) -> dict[str, int]:
    """The number of values in each histogram."""
    assert isinstance(found, dict)
    histograms = {k: v for k, v in found.items() if isinstance(v, MetricHistogram)}
    return {name: sum(one.counts()) for name, one in histograms.items()}


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[MeteredBus]:
    opened = MeteredBus(open_bus(f"sqlite:{tmp_path / 'bus'}"))
    opened.create(catalogue())
    yield opened
    opened.close()


def test_a_bus_counts_bytes_by_topic_and_times_its_requests(bus: MeteredBus) -> None:
    bus.append("status", [ENTRY, ENTRY])
    bus.append("ledger", [ENTRY])
    assert len(bus.read("status", {0: 1})) == 1
    bus.end("status")
    found = bus.metric_values()
    assert found["bus_appended_bytes_total"] == {"status": 16, "ledger": 8}
    assert found["bus_read_bytes_total"] == {"status": 8}
    assert counted(found["bus_seconds"]) == {"append": 2, "positions": 1}
    assert (found["bus_in_doubt_total"], found["bus_retries_total"]) == (0, 0)


def test_an_append_without_an_answer_is_in_doubt_and_a_refused_one_is_not(tmp_path: Path) -> None:
    lossy = MeteredBus(Lossy(open_bus(f"sqlite:{tmp_path / 'bus'}")))
    lossy.create(catalogue())
    with pytest.raises(BusTimeout):
        lossy.append("status", [ENTRY])
    with pytest.raises(RecordTooLarge):
        lossy.append("status", [AppendEntry(b"key", b"x" * (8 << 20), 0)])
    found = lossy.metric_values()
    assert found["bus_in_doubt_total"] == 1
    assert found["bus_appended_bytes_total"] == {}
    assert counted(found["bus_seconds"])["append"] == 2


def test_a_store_counts_bytes_and_times_its_operations(tmp_path: Path) -> None:
    store = MeteredStore(open_store(f"file:{tmp_path / 'store'}"))
    store.put("a/1", b"12345")
    etag = store.create("a/2", b"123")
    store.swap("a/2", memoryview(b"1234"), etag)
    with pytest.raises(ObjectExists):
        store.create("a/1", b"1")
    assert store.get("a/1", 1, 3) == b"23"
    assert store.read("a/2")[0] == b"1234"
    assert store.stat("a/1").bytes == 5
    assert [one.key for one in store.list("a/")] == ["a/1", "a/2"]
    assert list(store.list("b/")) == []
    store.delete_all(["a/1", "a/2"])
    found = store.metric_values()
    assert found["store_bytes_total"] == {"read": 6, "written": 12}
    wanted = {"write": 4, "read": 2, "stat": 1, "list": 2, "delete": 1}
    assert counted(found["store_seconds"]) == wanted


@contextmanager
def silent_server() -> Iterator[int]:
    """A server that closes each connection after the request."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client:
                    client.recv(65536)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def test_a_bucket_without_answers_is_asked_again_and_its_writes_are_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with silent_server() as port:
        place = f"endpoint=http://127.0.0.1:{port}&path_style=true&region=us-east-1&deadline_s=1"
        store = MeteredStore(open_store(f"s3://bucket/prefix?{place}"))
        with pytest.raises(StoreTimeout):
            store.get("key")
        found = store.metric_values()
        assert found["store_retries_total"] > 1  # pyright: ignore[reportOperatorIssue]
        assert found["store_in_doubt_total"] == 0
        with pytest.raises(StoreTimeout):
            store.put("key", b"1")
        assert store.metric_values()["store_in_doubt_total"] > 0  # pyright: ignore[reportOperatorIssue]


def test_requests_to_a_broker_that_are_sent_again_are_counted() -> None:
    attempts = itertools.count(1)

    class Client:
        def advertised(self) -> list[tuple[str, int]]:
            return []

    def make() -> Client:
        if next(attempts) < 3:
            raise OSError("refused")
        return Client()

    admin = RetryingAdmin("here", make, 5.0)  # pyright: ignore[reportArgumentType]
    assert admin.call("ask", lambda client: "an answer") == "an answer"
    assert admin.retries == 2


def test_histograms_of_several_operations_are_series_of_one_family(tmp_path: Path) -> None:
    store, watch = MeteredStore(open_store(f"file:{tmp_path / 's'}")), threading.Event()
    store.put("key", b"1")
    metrics = ProcessMetrics(watch)
    metrics.dependencies.append(store.metric_values)
    with serve_metrics(PLAIN, tmp_path, "train", "trainer", metrics, {}):
        found = scrape(endpoint(tmp_path, "trainer")["url"])
    assert value(found, "rollstream_store_seconds_count", operation="write") == 1
    assert value(found, "rollstream_store_seconds_count", operation="read") == 0
    assert value(found, "rollstream_store_seconds_bucket", operation="write", le="+Inf") == 1
    assert value(found, "rollstream_build_info") == 1
    ((labels, _),) = found["rollstream_build_info"]
    assert set(labels) == {"run", "role", "name", "version", "revision"}
