"""Addresses, answers of servers and other short texts: a value or a typed error."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hypothesis import example, given, strategies as st

from rollstream.storage.relay.client import RelayConnection, body_length
from rollstream.storage.relay.object import (
    parse_integer,
    parse_key,
    parse_push_range,
    parse_range,
    parse_wait,
)
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.stores.s3.address import parse_s3_url
from rollstream.streams.kafka.address import parse_kafka_url
from rollstream.streams.kafka.bus import _parse_fence  # pyright: ignore[reportPrivateUsage]
from rollstream.streams.records import Fence
from testbed.memory import MemoryStore
from tests.edges.fuzz.damage import TAILS, changed_bytes, checked, examples

KAFKA = "kafka://a:9092,b:9093/lab.run?security=sasl_ssl&mechanism=plain&linger_ms=5&ca=/x"
S3 = "s3://bucket/prefix/a?endpoint=http://127.0.0.1:9000&path_style=true&deadline_s=5"
PIECES = st.sampled_from(
    ["[", "]", "@", ":", "//", "?", "&", "=", "%", "%00", "#", "\u2100", "9" * 5000, "\udcff",
     "nan", "inf", "-1", "1e999", "\x00", "\u0661", "é", ",", "://", "..", "http://[::1"]
)  # fmt: skip


@st.composite
def urls(draw: st.DrawFn, sample: str) -> str:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(sample)))
        sample = sample[:at] + draw(PIECES) + sample[at + draw(st.integers(0, 3)) :]
    return sample


@given(urls(KAFKA))
@example("kafka://[/x")
@example(f"kafka://a:{'9' * 5000}/x")
@example(f"kafka://a:1/x?linger_ms={'9' * 5000}")
@examples(150)
def test_a_kafka_url_is_parsed_or_refused(url: str) -> None:
    checked(lambda: parse_kafka_url(url))


@given(urls(S3))
@examples(150)
def test_an_s3_url_is_parsed_or_refused(url: str) -> None:
    address = checked(lambda: parse_s3_url(url))
    assert address is None or str(address)


@given(st.sampled_from(TAILS) | st.binary(max_size=20))
@examples(60)
@example(b"[Infinity, 1]")
@example(b"[1e999, 1]")
@example(b"[" + b"9" * 4000 + b", 1]")
def test_the_metadata_of_any_commit_are_a_fence(data: bytes) -> None:
    assert isinstance(_parse_fence(data.decode("latin-1")), Fence)


@given(st.sampled_from([0, 1, 40]), st.text(max_size=20) | PIECES)
@examples(150)
@example(5, "bytes=0-" + "9" * 15)
@example(5, "bytes=\u0661-")
def test_texts_of_a_request_to_a_relay_are_parsed_or_a_value_error(size: int, text: str) -> None:
    parsers = (
        lambda: parse_range(text, size),
        lambda: parse_push_range(text, text),
        lambda: parse_push_range(None, text),
        lambda: parse_key(text),
        lambda: parse_integer(text),
        lambda: parse_wait({"wait": text}),
    )
    for parse in parsers:
        try:
            parse()
        except ValueError:
            continue


@pytest.mark.parametrize("text", ["²", "\u0661", "9" * 5000, "-1", "1_0", "+5", " 5", "", "5, 5"])
def test_a_length_that_is_no_number_is_none(text: str) -> None:
    assert body_length({"content-length": text}) == 0


@contextmanager
def _relay(answer: bytes) -> Generator[str]:
    """A server that answers each connection by these bytes, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


LISTING = b'{"count":1,"objects":[{"key":"weights/v00000001-t0001/x","bytes":3,"hash":"0"}]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(LISTING) + LISTING


@given(st.data())
@examples(40)
@example(None)
def test_any_answer_of_a_relay_is_read_or_the_relay_is_lost(data: st.DataObject | None) -> None:
    if data is None:
        answer = ANSWER.replace(b"200", b"2\xb20").replace(b"Length: ", b"Length: \xb2")
    else:
        answer = changed_bytes(data.draw, ANSWER)
    with _relay(answer) as url:

        def listing() -> object:
            with RelayConnection(url) as connection:
                return connection.listing()

        checked(listing)


@pytest.mark.parametrize("length", ["999999999999999", "9" * 400, "²", "-5"])
def test_a_relay_that_states_a_length_gets_no_memory_for_it(length: str, tmp_path) -> None:
    key = "weights/v00000001-t0001/x"
    store = MemoryStore()
    store.put(key, b"bucket")
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode("latin-1") + b"abc"
    with _relay(answer) as url:
        found = checked(lambda: RelayStore(store, tmp_path, url).get(key))
    assert found in (b"bucket", b"")


@given(urls("http://127.0.0.1:1/x"))
@examples(60)
@example("http://１２７.0.0.1:1/x")
@example("http://127.0.0.1:99999999/")
def test_any_url_of_a_relay_is_refused(url: str) -> None:
    checked(lambda: RelayConnection(url).close())
