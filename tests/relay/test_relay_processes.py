"""Chains of real relay processes that are killed, stopped, late, deceived and slow."""

import os
import signal
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.storage.relay.client import BandwidthLimiter, RelayConnection
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.manifest import manifest_key, version_folder
from rollstream.streams.records import RelayStatus
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.relay_network import RelayNet, RelayProcess, manifest_of
from testbed.servers import versity
from testbed.servers.fault_proxy import FOREVER, Fault, FaultProxy
from testbed.waiting import WAIT_S, wait_for

MIB = 1 << 20
V1 = Version(1, 1)
BIG = f"{version_folder(V1)}/model.safetensors"
SLOW = 4 * MIB  # bytes per second of a link during which a test acts


@pytest.fixture
def net(tmp_path: Path) -> Iterator[RelayNet]:
    with RelayNet(tmp_path, {"timeout_s": 3, "patience_s": 30}) as net:
        yield net


def files(size: int = 2 * MIB) -> dict[str, bytes]:
    return {"model.safetensors": os.urandom(size), "config.json": b"{}", "empty": b""}


def assert_whole(relay: RelayProcess, version: Version, content: dict[str, bytes]) -> None:
    wait_for(lambda: relay.has(version))
    for name, data in content.items():
        assert (relay.folder / version_folder(version) / name).read_bytes() == data


def total(relays: list[RelayProcess], figure: str) -> int:
    return sum(relay.figure(figure) for relay in relays if relay.process.poll() is None)


def whole_bytes(version: Version, content: dict[str, bytes]) -> int:
    return sum(map(len, content.values())) + len(encode_json(manifest_of(version, content)))


def test_one_version_leaves_the_bucket_once_for_all_relays(net: RelayNet) -> None:
    relays, content = net.start_chain("a", "b", "c"), files()
    version = net.publish(1, content)
    for relay in relays:
        assert_whole(relay, version, content)
    assert total(relays, "bucket_bytes_total") == whole_bytes(version, content)
    assert [relay.status()["upstream"] for relay in relays] == ["bucket", "a/1", "b/2"]


def test_a_pushed_version_is_everywhere_before_it_is_believed(net: RelayNet) -> None:
    relays, content = net.start_chain("a", "b", "c"), files()
    manifest = net.write(1, content, net.pushing())
    for relay in relays:
        assert_whole(relay, manifest.version, content)
        assert relay.status()["announced"] == []
    assert total(relays, "bucket_bytes_total") == 0
    assert net.store.get(BIG) == content["model.safetensors"]


def test_a_relay_killed_in_the_middle_is_spliced_out_and_nothing_is_fetched_again(
    net: RelayNet,
) -> None:
    relays, content = net.start_chain("a", "b", "c", send_bytes_per_s=SLOW), files(12 * MIB)
    first, middle, last = relays
    version = net.publish(1, content)
    wait_for(lambda: last.receives(BIG, 2 * MIB))
    middle.kill()
    assert_whole(last, version, content)
    assert last.figure("received_bytes_total") == whole_bytes(version, content)
    assert last.figure("bucket_bytes_total") == 0
    assert last.status()["upstream"] == "a/1"
    assert total([first, last], "bucket_bytes_total") == whole_bytes(version, content)


def test_a_head_killed_while_the_trainer_pushes_is_replaced_by_the_next(net: RelayNet) -> None:
    first, second, third = net.start_chain("a", "b", "c", send_bytes_per_s=SLOW)
    content, store = files(12 * MIB), net.pushing(bytes_per_s=SLOW)
    net.write(1, content, store)
    wait_for(lambda: third.receives(BIG, 2 * MIB))
    first.kill()
    for relay in (second, third):
        assert_whole(relay, V1, content)
    assert second.status()["upstream"] == "bucket"
    assert second.figure("bucket_bytes_total") == 0
    came = second.figure("received_bytes_total"), second.figure("pushed_bytes_total")
    assert min(came) > 0
    assert sum(came) == whole_bytes(V1, content)
    assert third.figure("received_bytes_total") == whole_bytes(V1, content)


def test_a_stopped_relay_is_passed_over_and_catches_up_when_it_resumes(net: RelayNet) -> None:
    relays, content = net.start_chain("a", "b", "c", send_bytes_per_s=SLOW), files(8 * MIB)
    _, middle, last = relays
    version = net.publish(1, content)
    wait_for(lambda: last.receives(BIG, 2 * MIB))
    middle.send_signal(signal.SIGSTOP)
    assert_whole(last, version, content)
    assert last.figure("received_bytes_total") == whole_bytes(version, content)
    middle.send_signal(signal.SIGCONT)
    assert_whole(middle, version, content)
    wait_for(lambda: last.status()["upstream"] == "b/2")
    assert total(relays, "bucket_bytes_total") == whole_bytes(version, content)


def test_a_stopped_head_does_not_hold_up_the_others(net: RelayNet) -> None:
    first, second, third = net.start_chain("a", "b", "c")
    first.send_signal(signal.SIGSTOP)
    content = files()
    version = net.publish(1, content)
    for relay in (second, third):
        assert_whole(relay, version, content)
    assert third.figure("bucket_bytes_total") == 0


def test_a_late_relay_copies_from_its_neighbour(net: RelayNet) -> None:
    net.start_chain("a", "b")
    versions = {number: files(100_000) for number in (1, 2, 3, 4)}
    for number, content in versions.items():
        net.publish(number, content)
    wait_for(lambda: net.relays[1].has(Version(4, 1)))
    (late,) = net.start("late")
    assert_whole(late, Version(4, 1), versions[4])
    assert late.figure("bucket_bytes_total") == 0
    assert late.status()["upstream"] == "b/2"


def test_a_push_that_never_ends_does_not_hold_up_what_is_whole(net: RelayNet) -> None:
    (first,) = net.start("a")
    content = files()
    version = net.publish(1, content)
    wait_for(lambda: first.has(version))
    with RelayConnection(
        first.url
    ) as dying:  # a trainer that was killed in the middle of its next version
        size = {"Content-Length": str(MIB), "X-Content-Hash": "0" * 32, "Expect": "100-continue"}
        assert dying.request("PUT", f"/{version_folder(Version(2, 1))}/model", size)[0] == 100
        (late,) = net.start("late")
        assert_whole(late, version, content)
        assert late.figure("bucket_bytes_total") == 0


def test_a_push_that_failed_comes_from_the_bucket_while_newer_versions_are_pushed(
    net: RelayNet,
) -> None:
    """As when one of several ranks cannot push, and the others do all the time."""
    (relay,) = net.start("a")
    content = files()
    manifest = net.write(1, content)
    with RelayConnection(relay.url) as whole, RelayConnection(relay.url) as newer:
        data = encode_json(manifest)
        sizes = {"Content-Length": str(len(data)), "X-Content-Hash": manifest.hash}
        whole.send_head("PUT", f"/{manifest_key(V1)}", sizes)
        whole.send_body(data, BandwidthLimiter())
        assert whole.read_head(WAIT_S)[0] == 201
        net.announce(manifest)
        size = {"Content-Length": str(MIB), "X-Content-Hash": "0" * 32, "Expect": "100-continue"}
        assert newer.request("PUT", f"/{version_folder(Version(2, 1))}/model", size)[0] == 100
        wait_for(lambda: newer.send_body(b"more", BandwidthLimiter()) and relay.has(V1))
    assert_whole(relay, V1, content)


def test_a_restarted_relay_stands_at_the_end_with_its_next_term(net: RelayNet) -> None:
    first, second = net.start_chain("a", "b")
    content = files()
    version = net.publish(1, content)
    assert_whole(second, version, content)
    first.kill()
    assert (first.folder / BIG).exists()  # memory outlives a killed process …
    (again,) = net.start("a")
    assert_whole(again, version, content)  # … and was emptied by its successor
    assert again.status()["upstream"] == "b/2"
    assert again.figure("received_bytes_total") == whole_bytes(version, content)


def test_a_relay_that_was_asked_to_stop_frees_its_memory(net: RelayNet) -> None:
    (relay,) = net.start("a")
    version = net.publish(1, files())
    wait_for(lambda: relay.has(version))
    relay.send_signal(signal.SIGTERM)
    assert relay.process.wait(WAIT_S) == 143
    assert not relay.folder.exists()


def test_two_relays_do_not_share_a_folder(net: RelayNet) -> None:
    (relay,) = net.start("a")
    with pytest.raises(AssertionError, match="another relay uses"):
        net.start("b", folder=relay.folder)


@contextmanager
def liar(net: RelayNet, honest: RelayProcess, part: bytes) -> Generator[None]:
    """A neighbour with a valid listing and wrong bytes, in front of an honest one. It has one
    heartbeat: those who shall believe it need a long `timeout_s`.
    """
    with FaultProxy(honest.url) as proxy:
        proxy.inject(Fault("corrupt", where=f"{part.decode()}?receiving", count=FOREVER))
        status = RelayStatus("liar", 2, "x", proxy.endpoint, (), "a/1", 9e9)
        publish(net.bus, "status", "liar/2", status)
        yield


def test_what_a_neighbour_corrupts_comes_from_the_bucket_once_and_loudly(net: RelayNet) -> None:
    (first,) = net.start("a")
    content = files()
    version = net.publish(1, content)
    assert_whole(first, version, content)
    net.store.put("roles/relays/chain.json", b'{"role":"relays","name":"chain","term":2}')
    with liar(net, first, b"model.safetensors"):
        third, fourth = net.start_chain("c", "d", timeout_s=600)
        for relay in (third, fourth):
            assert_whole(relay, version, content)
    assert third.figure("wrong_total") >= 1
    assert third.figure("bucket_bytes_total") == len(content["model.safetensors"])
    assert fourth.figure("bucket_bytes_total") == 0
    assert "was received with hash" in third.log.read_text()


def test_a_slow_bucket_is_read_by_one_while_the_others_wait(tmp_path: Path) -> None:
    url = versity.new_url()
    server = url.split("endpoint=")[1].split("&")[0]
    with FaultProxy(server) as proxy:
        slow = url.replace(server, proxy.endpoint)
        with RelayNet(tmp_path, {"timeout_s": 3}, slow) as net:
            relays, content = net.start_chain("a", "b"), files()
            manifest = net.write(1, content)
            proxy.inject(Fault("delay", 3.0, method="GET", where="/weights/", count=2))
            before = len(proxy.requests)
            net.announce(manifest)
            for relay in relays:
                assert_whole(relay, manifest.version, content)
            asked = [line for line in proxy.requests[before:] if "/weights/" in line]
            assert len([line for line in asked if line.startswith("GET")]) <= 5
            assert len([line for line in asked if "manifest.json" in line]) == 1
            assert relays[1].figure("bucket_bytes_total") == 0


def test_a_neighbour_that_never_brings_an_announced_version_is_not_waited_for_forever(
    net: RelayNet,
) -> None:
    content = files(5 * MIB)
    net.start("small", bytes_max=2 * MIB)
    (second,) = net.start("b", patience_s=1)
    assert_whole(second, net.publish(1, content), content)
    assert second.figure("bucket_bytes_total") >= len(content["model.safetensors"])


def test_what_was_pushed_to_a_head_that_died_comes_from_the_bucket(net: RelayNet) -> None:
    first, second = net.start_chain("a", "b", send_bytes_per_s=SLOW)
    content = files(12 * MIB)
    manifest = net.write(1, content, net.pushing())
    wait_for(lambda: first.has(V1))
    wait_for(lambda: second.receives(BIG, 2 * MIB))
    first.kill()
    net.announce(manifest)
    assert_whole(second, V1, content)
    came = second.figure("received_bytes_total"), second.figure("bucket_bytes_total")
    assert min(came) > 0
    assert sum(came) == whole_bytes(V1, content)


def test_a_deposed_trainers_push_is_dropped_by_all(net: RelayNet) -> None:
    """Invariant 6: the unannounced version of a lower term is never believed, and never served as
    believed.
    """
    relays, content = net.start_chain("a", "b"), files()
    believed = net.publish(1, content)
    zombie = net.write(2, files(), net.pushing())
    wait_for(lambda: all(relay.has(zombie.version) for relay in relays))
    net.trainer(2)
    fresh = net.publish(3, content)
    for relay in relays:
        assert_whole(relay, fresh, content)
        assert not relay.has(zombie.version)
        assert not (relay.folder / manifest_key(zombie.version)).exists()
    assert net.store.get(manifest_key(believed))


def test_a_wrong_object_in_the_bucket_is_never_offered(net: RelayNet) -> None:
    (relay,) = net.start("a")
    content = files()
    manifest = net.write(1, content)
    net.store.put(BIG, bytes(len(content["model.safetensors"])))
    net.announce(manifest)
    wait_for(lambda: relay.figure("wrong_total") >= 1)
    assert not (relay.folder / BIG).exists()
    assert not relay.has(V1)


def test_a_listing_without_a_token_names_the_objects(net: RelayNet) -> None:
    (relay,) = net.start("a")
    content = files()
    net.publish(1, content)
    wait_for(lambda: relay.has(V1))
    with RelayConnection(relay.url) as wire:
        listing = wire.listing()
    assert {offer.key.rpartition("/")[2] for offer in listing.objects} == {
        *content,
        "manifest.json",
    }
    assert all(offer.verified for offer in listing.objects)


def test_a_port_that_is_taken_is_reported(net: RelayNet) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(AssertionError, match="cannot listen on"):
        net.start("a", port=taken.getsockname()[1])
