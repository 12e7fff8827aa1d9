"""A relay's answers to valid and to hostile requests, on real sockets."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.storage.relay.cache import STALLED_OBJECT_S, RelayCache
from rollstream.storage.relay.client import (
    TOKEN_VARIABLE,
    BandwidthLimiter,
    RelayConnection,
    RelayListing,
    RelayRefused,
)
from rollstream.storage.relay.object import CHUNK_BYTES, ObjectOffer
from rollstream.storage.relay.relay import Relay
from rollstream.storage.relay.server import RelayServer
from rollstream.storage.settings import RelaySettings
from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.json_objects import encode_json
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from testbed.memory import MemoryBus, MemoryStore
from testbed.relay_network import manifest_of

V1, V2 = Version(1, 1), Version(2, 1)
DATA = os.urandom(3 * CHUNK_BYTES + 17)
KEY = f"weights/{V1}/model.safetensors"
SECRET = "a secret beside the folder"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RelayServer]:
    (tmp_path / "secret").write_text(SECRET)
    cache = RelayCache(tmp_path / "relay", versions_max=2, bytes_max=16 << 20)
    server = RelayServer(("127.0.0.1", 0), cache, BandwidthLimiter(), 8, lambda: {"relay": "r"})
    yield server
    server.end()
    cache.close()


def ask(server: RelayServer, method: str, target: str, body: bytes = b"", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body or None, named)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def put(server: RelayServer, key: str, data: bytes) -> int:
    return ask(server, "PUT", f"/{key}", data, X_Content_Hash=content_hash(data))[0]


def put_manifest(server: RelayServer, version: Version, files: dict[str, bytes]) -> int:
    return put(server, f"weights/{version}/manifest.json", encode_json(manifest_of(version, files)))


def test_a_whole_version_is_offered_and_served_by_range(server: RelayServer) -> None:
    assert put(server, KEY, DATA) == 201
    assert ask(server, "GET", f"/{KEY}")[0] == 404  # no manifest names it yet
    assert put_manifest(server, V1, {"model.safetensors": DATA}) == 201
    assert ask(server, "GET", f"/{KEY}") == (200, DATA)
    assert ask(server, "GET", f"/{KEY}", Range="bytes=5-9") == (206, DATA[5:10])
    assert ask(server, "GET", f"/{KEY}", Range=f"bytes={CHUNK_BYTES}-") == (206, DATA[CHUNK_BYTES:])
    assert ask(server, "GET", f"/{KEY}", Range=f"bytes=9-{10**12}") == (206, DATA[9:])
    assert ask(server, "GET", f"/{KEY}", Range=f"bytes={len(DATA)}-")[0] == 416
    assert server.cache.versions() == [V1]


def test_a_list_that_has_not_changed_is_not_sent_again(server: RelayServer) -> None:
    """A neighbour asks once a second, over the link between two sites too."""
    assert put(server, KEY, DATA) == 201
    with RelayConnection(f"http://127.0.0.1:{server.port}") as wire:
        whole = wire.listing()
        assert [offer.key for offer in whole.objects] == [KEY]
        assert wire.listing(whole.count) == RelayListing(whole.count, ())
        assert put_manifest(server, V1, {"model.safetensors": DATA}) == 201
        newer = wire.listing(whole.count)
        assert len(newer.objects) == 2
        assert wire.listing(newer.count).objects == ()
    unchanged = json.loads(ask(server, "GET", f"/objects?after={newer.count}")[1])
    assert unchanged["count"] == newer.count
    assert len(unchanged["objects"]) == 2, (
        "an earlier release's relay reads the whole list each time"
    )


def test_an_empty_object_is_an_object(server: RelayServer) -> None:
    assert put(server, KEY, b"") == 201
    put_manifest(server, V1, {"model.safetensors": b""})
    assert ask(server, "GET", f"/{KEY}") == (200, b"")
    assert server.cache.versions() == [V1]


@pytest.mark.parametrize(
    "target",
    [
        "/secret",
        "/../secret",
        "/weights/../../secret",
        f"/weights/{V1}/../../../secret",
        f"/weights/{V1}/..",
        f"/weights/{V1}/.hidden",
        f"/weights/{V1}/%2e%2e%2fsecret",
        f"/weights/{V1}/a%00b",
        f"/weights/{V1}/a\x00b",
        f"/weights/{V1}/",
        f"/weights/{V1}",
        f"/weights/{V1}/a/b",
        f"/weights//{V1}/model.safetensors",
        "/weights/v1-t1/model.safetensors",
        "/weights/v000000001-t0001/model.safetensors",
        f"/weights/{V1}/{'x' * 300}",
        "/weights/latest.json",
        "/blobs/x",
        "/etc/passwd",
        "file:///etc/passwd",
        "/",
        "*",
        f"/{'x' * 5000}",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_a_path_outside_the_store_is_refused(server: RelayServer, target: str, method: str) -> None:
    request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    request += f"X-Content-Hash: {content_hash(b'')}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request.encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.split(b" ")[1] in (b"400", b"404")
    assert SECRET.encode() not in answer
    assert server.cache.objects() == []


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"\x00\xff\x16\x03 nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"DELETE /status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /status HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /objects?after=x HTTP/1.1\r\n\r\n",
        b"GET /objects?wait=nan HTTP/1.1\r\n\r\n",
        b"GET /objects?wait=9999 HTTP/1.1\r\n\r\n",
        b"GET /objects?" + b"&".join(b"a=1" for _ in range(50)) + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_rubbish_is_an_error_and_the_relay_serves_on(server: RelayServer, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert not answer.startswith(b"HTTP/1.1 2")
    assert json.loads(ask(server, "GET", "/status")[1]) == {"relay": "r"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X_Content_Hash": "no hash"},
        {"X_Content_Hash": "0" * 32, "Content_Range": "bytes 0-3/9"},
        {"X_Content_Hash": "0" * 32, "Content_Range": "bytes 7-8/9"},
        {"X_Content_Hash": "0" * 32, "Content_Range": "bytes x"},
    ],
)
def test_a_push_without_a_description_is_refused(
    server: RelayServer, headers: dict[str, str]
) -> None:
    assert ask(server, "PUT", f"/{KEY}", b"1234", **headers)[0] == 400
    assert server.cache.objects() == []


def test_a_push_with_wrong_content_is_refused_and_may_come_again(server: RelayServer) -> None:
    wrong = ask(server, "PUT", f"/{KEY}", b"1234", X_Content_Hash=content_hash(b"5678"))
    assert wrong[0] == 422
    assert server.cache.counters["relay_wrong_total"] == 1
    assert put(server, KEY, b"5678") == 201


def test_an_object_above_the_bound_is_refused_before_its_body_is_sent(server: RelayServer) -> None:
    head = f"PUT /{KEY} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n"
    head += f"X-Content-Hash: {'0' * 32}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head.encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")
    assert server.cache.bytes() == 0


def test_a_refusal_is_read_by_a_client_that_sends_its_whole_body_first(
    server: RelayServer,
) -> None:
    body = bytes(48 << 20)  # more than the sockets of both sides buffer
    assert ask(server, "PUT", f"/{KEY}", body, X_Content_Hash="0" * 32)[0] == 413


def test_older_versions_make_room_and_are_not_taken_again(server: RelayServer) -> None:
    for number in (1, 2, 3):
        assert put(server, f"weights/{Version(number, 1)}/model.safetensors", b"x" * 100) == 201
        put_manifest(server, Version(number, 1), {"model.safetensors": b"x" * 100})
    assert server.cache.versions() == [V2, Version(3, 1)]
    assert put(server, KEY, b"x" * 100) == 409
    assert not (server.cache.folder / KEY).exists()


def test_a_file_that_its_manifest_does_not_name_is_dropped(server: RelayServer) -> None:
    put(server, KEY, b"what was pushed")
    put(server, f"weights/{V1}/other.bin", b"not in the manifest")
    put_manifest(server, V1, {"model.safetensors": b"what was meant!"})
    assert [held.key for held in server.cache.objects()] == [f"weights/{V1}/manifest.json"]
    assert put(server, KEY, b"what was pushed") == 409
    assert put(server, KEY, b"what was meant!") == 201
    assert server.cache.versions() == [V1]


def announced(version: Version, manifest_hash: str) -> WeightsAnnounced:
    return WeightsAnnounced("run", version, "", manifest_hash, "anchor", None, 0, 0.0)


def test_a_version_that_was_never_believed_goes_when_a_higher_term_announces(
    server: RelayServer,
) -> None:
    """Invariant 6: a zombie's objects are never believed."""
    for number in (4, 5):
        put(server, f"weights/{Version(number, 1)}/a", b"old")
        put_manifest(server, Version(number, 1), {"a": b"old"})
    believed = manifest_of(Version(4, 1), {"a": b"old"}).hash
    server.cache.announce(announced(Version(4, 1), believed), term=2)
    assert server.cache.versions() == [Version(4, 1)]
    assert put(server, f"weights/{Version(6, 1)}/a", b"zombie") == 409
    assert put(server, f"weights/{Version(5, 2)}/a", b"new") == 201


def believe(server: RelayServer, number: int, data: bytes) -> None:
    """A whole version of the trainer's term 1, pushed and announced."""
    version = Version(number, 1)
    assert put(server, f"weights/{version}/a", data) == 201
    assert put_manifest(server, version, {"a": data}) == 201
    server.cache.announce(announced(version, manifest_of(version, {"a": data}).hash), term=1)


def begin_push(server: RelayServer, version: Version, size: int) -> bytes:
    """The answer to the head of a push whose body never comes."""
    head = f"PUT /weights/{version}/x HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
    head += f"X-Content-Hash: {'0' * 32}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head.encode())
        return client.recv(1 << 16).split(b" ")[1]


@pytest.mark.parametrize(
    "version",
    [
        Version(99_999_999, 999_999_999),
        Version(99_999_999, 1),
        Version(3, 999_999_999),
        Version(7, 1),
        Version(1, 2),
    ],
)
def test_a_push_far_from_what_is_announced_is_refused_and_evicts_nothing(
    server: RelayServer, version: Version
) -> None:
    """One head without a body once emptied a relay and kept it empty."""
    believe(server, 1, b"one")
    believe(server, 2, b"two")
    assert begin_push(server, version, 16 << 20) == b"409"
    assert server.cache.versions() == [V1, V2]
    believe(server, 3, b"three")
    assert server.cache.versions() == [V2, Version(3, 1)]


def test_a_push_that_is_not_announced_gets_what_is_free_and_evicts_nothing(
    server: RelayServer,
) -> None:
    believe(server, 1, bytes(4 << 20))
    believe(server, 2, bytes(4 << 20))
    assert begin_push(server, Version(3, 1), 16 << 20) == b"409"
    assert begin_push(server, Version(4, 1), 7 << 20) == b"100"  # it kept the free room …
    assert server.cache.versions() == [V1, V2]
    assert put(server, f"weights/{Version(3, 1)}/a", bytes(4 << 20)) == 409
    third = manifest_of(Version(3, 1), {"a": bytes(4 << 20)})
    server.cache.announce(announced(Version(3, 1), third.hash), term=1)
    put_manifest(server, Version(3, 1), {"a": bytes(4 << 20)})
    assert put(server, f"weights/{Version(3, 1)}/a", bytes(4 << 20)) == 201
    assert server.cache.versions() == [V2, Version(3, 1)]  # … and is evicted for a believed version


def test_a_trainer_that_opens_a_term_may_push_under_it(server: RelayServer) -> None:
    believe(server, 1, b"one")
    assert put(server, f"weights/{Version(2, 2)}/a", b"next") == 409
    server.cache.note_opened(2)
    assert put(server, f"weights/{Version(2, 2)}/a", b"next") == 201


def test_a_push_that_comes_to_a_halt_is_dropped(server: RelayServer) -> None:
    believe(server, 1, b"one")
    assert begin_push(server, V2, 1 << 20) == b"100"
    server.cache.drop_stalled(100.0)
    server.cache.drop_stalled(100.0 + STALLED_OBJECT_S)
    assert server.cache.find(f"weights/{V2}/x") is not None
    server.cache.drop_stalled(101.0 + STALLED_OBJECT_S)
    assert server.cache.find(f"weights/{V2}/x") is None
    assert server.cache.versions() == [V1]


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
@pytest.mark.parametrize(
    ("given", "status"),
    [("", 401), ("Bearer ", 401), ("Bearer another-word", 401), ("Bearer \xff", 401)],
)
def test_with_a_token_requests_without_it_are_refused(
    tmp_path: Path, method: str, given: str, status: int
) -> None:
    cache = RelayCache(tmp_path / "relay", versions_max=2, bytes_max=16 << 20)
    server = RelayServer(("127.0.0.1", 0), cache, BandwidthLimiter(), 8, dict, "the-shared-word")
    try:
        body = b"1234" if method == "PUT" else b""
        hashed = {"X_Content_Hash": content_hash(b"1234")}
        assert ask(server, method, f"/{KEY}", body, Authorization=given, **hashed)[0] == status
        assert cache.objects() == []
        known = {"Authorization": "Bearer the-shared-word", **hashed}
        assert ask(server, "PUT", f"/{KEY}", b"1234", **known)[0] == 201
    finally:
        server.end()
        cache.close()


def test_relays_find_the_token_in_the_environment_and_clients_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the-shared-word")
    bus, store = MemoryBus(), MemoryStore()
    bus.create(catalogue())
    relay = Relay(bus, store, RelaySettings(host="0.0.0.0"), "a", tmp_path / "relay")
    try:
        url = (tmp_path / "relay" / "url").read_text()
        with RelayConnection(url) as wire:
            assert wire.listing().objects == ()
        monkeypatch.delenv(TOKEN_VARIABLE)
        with RelayConnection(url) as wire, pytest.raises(RelayRefused):
            wire.listing()
    finally:
        relay.close()
    assert "the-shared-word" not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_relay_listens_beyond_its_machine_only_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    bus = MemoryBus()
    bus.create(catalogue())
    with pytest.raises(ConfigurationError, match=f"set {TOKEN_VARIABLE} to the same value"):
        Relay(bus, MemoryStore(), RelaySettings(host=host), "a", tmp_path / "relay")


def test_a_manifest_that_is_not_the_announced_one_is_dropped(server: RelayServer) -> None:
    put(server, KEY, b"abc")
    put_manifest(server, V1, {"model.safetensors": b"abc"})
    server.cache.announce(announced(V1, "f" * 32), term=1)
    assert server.cache.objects() == []
    assert put_manifest(server, V1, {"model.safetensors": b"abc"}) == 409


def test_a_neighbour_gets_bytes_while_they_come_and_a_rollout_when_they_are_verified(
    server: RelayServer,
) -> None:
    held = server.cache.accept(ObjectOffer(KEY, len(DATA), content_hash(DATA)))
    assert held is not None
    with held.writing(), socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(f"GET /{KEY}?receiving=1 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        room = held.room()
        room[:] = DATA[: len(room)]
        held.advance(len(room))
        got = b""
        while len(got.partition(b"\r\n\r\n")[2]) < CHUNK_BYTES:
            got += client.recv(1 << 16)
        assert got.partition(b"\r\n\r\n")[2] == DATA[:CHUNK_BYTES]
        assert ask(server, "GET", f"/{KEY}")[0] == 404


def test_more_requests_than_the_bound_are_answered_with_retry_later(server: RelayServer) -> None:
    server.cache.accept(ObjectOffer(KEY, 10, "0" * 32))
    clients = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(8)]
    try:
        for client in clients:
            client.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert ask(server, "GET", "/status")[0] == 503
    finally:
        for client in clients:
            client.close()


def test_two_writers_are_never_at_one_object(server: RelayServer) -> None:
    held = server.cache.accept(ObjectOffer(KEY, len(DATA), content_hash(DATA)))
    assert held is not None
    with held.writing():
        assert put(server, KEY, DATA) == 409
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(put(server, KEY, DATA))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses.count(201) == 1
    assert held.verified
