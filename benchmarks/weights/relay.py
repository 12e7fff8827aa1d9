"""A chain of relays as real processes over links of equal bandwidth, and its requests to the store.

Each link is the sending side of a process (`relay.send_bytes_per_s`, the trainer's push too): a
token bucket of 25 MB/s that lets at most 20 ms of it pass at once. The reference for publishing is
one such link that carries the same bytes once. A relay has a version when it offers all of it,
verified, to the rollouts of its node.
"""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.case import Case, alone
from rollstream.storage.relay.client import BandwidthLimiter
from rollstream.storage.relay.object import CHUNK_BYTES
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.stores.base import Data, ObjectStore
from rollstream.streams.values import Version
from testbed.relay_network import RelayNet, RelayProcess
from testbed.servers import versity

LINK = 25e6  # bytes per second
RELAYS = 8
SHARDS = 4
LATENCY_S = 5.0
LOOK_S = 0.005


def transfer_s(relays: int, size: int) -> float:
    """Seconds until the last of `relays` has `size` bytes that are forwarded chunk by chunk: a
    pipeline of (relays − 1 + chunks) turns of one chunk each.
    """
    return (relays - 1 + -(-size // CHUNK_BYTES)) * CHUNK_BYTES / LINK


def cases(quick: bool) -> Iterator[Case]:
    """256 MiB in four shards through eight relays (quick: 64 MiB)."""
    size = (64 if quick else 256) << 20
    files = {f"model-{n:05d}.safetensors": os.urandom(size // SHARDS) for n in range(SHARDS)}
    copy_s = _copy_s(size)
    at_once, cpu_s = _pushed(files, 0.0)
    late, _ = _pushed(files, LATENCY_S)
    note = f"{RELAYS} relays, {LINK / 1e6:g} MB/s links, {size >> 20} MiB, 1 MiB chunks"
    theory = transfer_s(RELAYS, size) / transfer_s(1, size)
    first, last = min(at_once), max(at_once)
    cpu = f"{cpu_s / (last * RELAYS) * 100:.0f} % of a core per relay"
    yield _at_most(
        "relay_chain",
        last,
        "time to the first relay",
        first,
        1.10,
        f"{note}; theory {theory:.3f}; {cpu}",
    )
    slow = f"{note}; {max(late):.2f} s with a store that takes {LATENCY_S:g} s for each object"
    yield _at_most("relay_publish", max(last, max(late)), "one copy over a link", copy_s, 1.2, slow)
    yield from _egress(files, size)
    for relays in (32, 128):
        seconds = transfer_s(relays, size)
        ratio = seconds / transfer_s(1, size)
        yield alone(f"relay_chain_{relays}", ratio, "x", note="arithmetic: (n - 1 + chunks) turns")


def _at_most(case: str, value: float, reference: str, base: float, goal: float, note: str) -> Case:
    """Seconds over seconds; the goal is the highest ratio that meets it."""
    ratio = value / base
    return Case(case, value, "s", reference, base, ratio, goal, ratio <= goal, note)


@dataclass
class _SlowStore:
    """A store whose every write takes `latency_s` longer."""

    store: ObjectStore
    latency_s: float

    def create(self, key: str, data: Data) -> str:
        time.sleep(self.latency_s)
        return self.store.create(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.store.get(key, start, end)


@contextmanager
def _net(store_url: str = "", rate: float = LINK) -> Generator[tuple[RelayNet, list[RelayProcess]]]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"send_bytes_per_s": rate, "timeout_s": 30}
        with RelayNet(Path(folder), settings, store_url) as net:
            yield net, net.start_chain(*(f"relay-{number}" for number in range(RELAYS)))


def _pushed(files: dict[str, bytes], latency_s: float) -> tuple[list[float], float]:
    """Seconds from the snapshot until each relay has the version; CPU seconds of all relays."""
    with _net() as (net, relays):
        late: ObjectStore = _SlowStore(net.store, latency_s)  # type: ignore[assignment]
        store = PushingStore(late, RelayDirectory(net.bus, 30.0), 1 << 30, BandwidthLimiter(LINK))
        cpu = _cpu_s(relays)
        started = time.monotonic()
        writer = threading.Thread(target=net.write, args=(1, files, store))
        writer.start()
        arrived = _arrivals(relays, Version(1, 1))
        writer.join()
        return [at - started for at in arrived], _cpu_s(relays) - cpu


def _arrivals(relays: Sequence[RelayProcess], version: Version) -> list[float]:
    """When each relay offered the last object of the version: its manifest lists no other."""
    arrived: dict[str, float] = {}
    while len(arrived) < len(relays):
        for relay in relays:
            folder = relay.folder / "weights" / str(version)
            there = relay.name not in arrived and (folder / "manifest.json").exists()
            if there and len(list(folder.iterdir())) == SHARDS + 1:
                arrived[relay.name] = time.monotonic()
        time.sleep(LOOK_S)
    return list(arrived.values())


def _cpu_s(relays: Sequence[RelayProcess]) -> float:
    times = [psutil.Process(relay.process.pid).cpu_times() for relay in relays]
    return sum(one.user + one.system for one in times)


def _copy_s(size: int) -> float:
    """One copy over one link, from memory to memory."""
    listener = socket.create_server(("127.0.0.1", 0))
    data, buffer = memoryview(bytes(size)), bytearray(CHUNK_BYTES)

    def send() -> None:
        pace = BandwidthLimiter(LINK)
        with socket.create_connection(listener.getsockname()) as sender:
            for at in range(0, size, CHUNK_BYTES // 4):
                pace.take(CHUNK_BYTES // 4)
                sender.sendall(data[at : at + CHUNK_BYTES // 4])

    started = time.monotonic()
    threading.Thread(target=send, daemon=True).start()
    receiver, _ = listener.accept()
    with listener, receiver:
        while receiver.recv_into(buffer):
            pass
    return time.monotonic() - started


def _egress(files: dict[str, bytes], size: int) -> Iterator[Case]:
    """Without a push: all relays get the announcement at the same moment, one reads the bucket."""
    url = versity.new_url()
    with _counted(url) as (counted_url, sent), _net(counted_url, 0.0) as (net, relays):
        manifest = net.write(1, files)
        before = sent[0]
        net.announce(manifest)
        _arrivals(relays, manifest.version)
        wire = sent[0] - before
        read = sum(relay.figure("bucket_bytes_total") for relay in relays)
    whole = manifest.bytes + len(_encoded(manifest))
    ratio = read / whole
    note = f"{RELAYS} relays, S3; {wire / whole:.4f} with HTTP's own bytes, as a proxy counted them"
    yield Case("relay_egress", read, "bytes", "one version", whole, ratio, 1.0, ratio <= 1, note)


def _encoded(manifest: object) -> bytes:
    from rollstream.storage.stores.json_objects import encode_json

    return encode_json(manifest)


@contextmanager
def _counted(url: str) -> Generator[tuple[str, list[int]]]:
    """The same store behind a proxy that counts the bytes that the server sends."""
    split = urlsplit(url.split("endpoint=")[1].split("&")[0])
    server = (split.hostname or "", split.port or 80)
    sent = [0]
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def carry(source: socket.socket, target: socket.socket, count: bool) -> None:
        try:
            while data := source.recv(1 << 18):
                sent[0] += len(data) if count else 0
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(server)
            for pair in ((client, upstream, False), (upstream, client, True)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    here = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url.replace(f"{server[0]}:{server[1]}", here), sent
    finally:
        listener.close()
