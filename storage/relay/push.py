"""The push: a thread that sends objects to the head of the chain, one after the other. If the head
fails, the next head gets the rest of the object.
"""

import logging
import queue
import threading
from collections import Counter

from rollstream.storage.stores.hashing import content_hash
from rollstream.storage.relay.chain import ChainMember
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.relay.pace import BandwidthLimiter
from rollstream.storage.relay.client import RelayLost, RelayConnection
from rollstream.errors import BusError
from rollstream.metric_values import MetricValues

log = logging.getLogger(__name__)

OBJECTS_MAX = 4096
HEADS_MAX = 8  # tried per object
ANSWER_S = 10.0  # for the final status of an object, which the head hashes as it arrives
POLL_S = 0.2


class ChainPush:
    """Holds at most `bytes_max` bytes of objects; an object beyond that is not pushed."""

    def __init__(self, directory: RelayDirectory, bytes_max: int, pace: BandwidthLimiter) -> None:
        self._directory, self._bytes_max, self._pace = directory, bytes_max, pace
        self._queue: queue.Queue[tuple[str, bytes]] = queue.Queue(OBJECTS_MAX)
        self._lock = threading.Lock()
        self._bytes = 0
        self._connection: RelayConnection | None = None
        self._thread: threading.Thread | None = None
        self._counters: Counter[str] = Counter()

    def hand_over(self, key: str, data: bytes) -> None:
        """Queue the object, or skip it if there is no room; returns at once."""
        with self._lock:
            if self._bytes + len(data) > self._bytes_max:
                self._counters["given_up"] += 1
                return
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="relay-push", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait((key, data))
        except queue.Full:
            self._done(len(data), given_up=True)

    def figures(self) -> MetricValues:
        return {
            "trainer_pushed_bytes_total": self._counters["bytes"],
            "trainer_push_given_up_total": self._counters["given_up"],
        }

    def _done(self, size: int, given_up: bool) -> None:
        with self._lock:
            self._bytes -= size
            self._counters["given_up"] += given_up

    def _run(self) -> None:
        while True:
            key, data = self._queue.get()
            given_up = True
            try:
                given_up = not self._push(key, data)
            except Exception:
                log.exception("pushing %s failed; relays read it from the bucket", key)
            finally:
                self._done(len(data), given_up)

    def _push(self, key: str, data: bytes) -> bool:
        """Send one object. Returns whether the chain has it, or gets it from elsewhere."""
        digest = content_hash(data)
        for _ in range(HEADS_MAX):
            head = self._head()
            if head is None:
                return False
            try:
                status = self._send(self._connected(head), key, data, digest)
            except RelayLost as error:
                self._disconnect()
                self._directory.suspect(head, error)
                continue
            if status in (201, 409):  # 409: fenced off, or already arriving from elsewhere
                return status == 201
            self._disconnect()
            log.warning("relay %s: status %d for %s", head.name, status, key)
        return False

    def _send(self, wire: RelayConnection, key: str, data: bytes, digest: str) -> int:
        """Send the bytes that the head lacks: a head that is gone may have forwarded the others.
        Returns the status.
        """
        status, headers = wire.request("HEAD", f"/{key}")
        start = int(headers.get("x-received", "0")) if status == 200 else 0
        if status == 200 and start == len(data) == int(headers.get("content-length", "-1")):
            return 201
        sizes = {
            "Content-Length": str(len(data) - start),
            "X-Content-Hash": digest,
            "Expect": "100-continue",
        }
        if start:
            sizes["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        status, headers = wire.request("PUT", f"/{key}", sizes)
        if status == 100:
            with memoryview(data) as view:
                self._counters["bytes"] += wire.send_body(view[start:], self._pace)
            status, headers = wire.read_head(ANSWER_S)
        if headers.get("connection", "").lower() == "close":
            self._disconnect()
        return status

    def _head(self) -> ChainMember | None:
        try:
            self._directory.poll(POLL_S)
        except BusError as error:
            log.warning("the head of the relay chain is unknown: %s", error)
        return self._directory.head()

    def _connected(self, head: ChainMember) -> RelayConnection:
        if self._connection is not None and not (
            self._connection.url == head.url and self._connection.is_open()
        ):
            self._disconnect()
        if self._connection is None:
            self._connection = RelayConnection(head.url)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
