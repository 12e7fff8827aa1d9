"""Sends new versions to the relays. A push guarantees nothing, and the trainer never waits for one:
relays verify a version against its announced manifest, and read missing objects from the bucket.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from rollstream.errors import BusError
from rollstream.metric_values import MetricValues
from rollstream.storage.relay.client import BandwidthLimiter, RelayConnection, RelayLost
from rollstream.storage.relay.object import MANIFEST, file_name_of, version_of
from rollstream.storage.relay.topology import ChainMember, RelayDirectory
from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore, content_hash
from rollstream.storage.stores.json_objects import create_idempotent
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

OBJECTS_MAX = 4096  # objects that wait for their push
HEADS_MAX = 8  # an object is given up after this many failed sends
ANSWER_S = 10.0  # for the final status; it comes soon, because the head hashes while it receives
POLL_S = 0.2  # the longest wait for new statuses of relays
UPLOADS_MAX = 4  # at the same time
VERSIONS_MAX = 4  # versions without a manifest yet; older ones were abandoned by their writer


class ChainPush:
    """At most `bytes_max` bytes wait or are being sent; a push that does not fit, fails, or finds
    no relay is given up.
    """

    def __init__(self, directory: RelayDirectory, bytes_max: int, pace: BandwidthLimiter) -> None:
        self._directory, self._bytes_max, self._pace = directory, bytes_max, pace
        self._queue: queue.Queue[tuple[str, bytes]] = queue.Queue(OBJECTS_MAX)
        self._lock = threading.Lock()
        self._bytes = 0
        self._connection: RelayConnection | None = None
        self._thread: threading.Thread | None = None
        self._counters: Counter[str] = Counter()

    def hand_over(self, key: str, data: bytes) -> None:
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

    def metric_values(self) -> MetricValues:
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
        """Returns False if the push is given up or refused."""
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
            if status in (201, 409):  # 409: the head does not want it, has it, or is receiving it
                return status == 201
            self._disconnect()
            if status == 413:
                log.error(
                    "%s is not pushed: relay %s keeps less than its %d bytes; raise "
                    "relay.bytes_max, or the shared memory of that machine",
                    key,
                    head.name,
                    len(data),
                )
                return False
            log.warning("relay %s: status %d for %s", head.name, status, key)
            if status == 401:  # this process has another secret than the relay: repeats are useless
                return False
        return False

    def _send(self, connection: RelayConnection, key: str, data: bytes, digest: str) -> int:
        status, headers = connection.request("HEAD", f"/{key}")
        if status == 401:
            return status
        # The previous head may have forwarded these bytes before it failed.
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
        status, headers = connection.request("PUT", f"/{key}", sizes)
        if status == 100:
            with memoryview(data) as view:
                self._counters["bytes"] += connection.send_body(view[start:], self._pace)
            status, headers = connection.read_head(ANSWER_S)
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


class PushingStore:
    """Uploads and pushes in the background; at most `bytes_max` bytes wait for their upload, and as
    many for their push.

    `create` of a version's object returns before the object is stored; reading, listing and
    deleting wait for the upload. `create` of the manifest waits for all objects of its version, so
    the manifest is still the last object (invariant 6). It raises an upload error, or `settle`
    does, where a rank that creates no manifest waits (`consumers/trainer/sharded/rank_writing.py`).
    """

    def __init__(
        self,
        store: ObjectStore,
        directory: RelayDirectory,
        bytes_max: int,
        pace: BandwidthLimiter | None = None,
    ) -> None:
        self._store, self._bytes_max = store, bytes_max
        self._push = ChainPush(directory, bytes_max, pace or BandwidthLimiter())
        self._pool = ThreadPoolExecutor(UPLOADS_MAX, "upload")
        self._lock = threading.Lock()
        # By version and key, the size in bytes and the upload.
        self._uploads: dict[Version, dict[str, tuple[int, Future[str]]]] = {}

    def create(self, key: str, data: Data) -> str:
        version = version_of(key)
        if version is None:
            return self._store.create(key, data)
        # Content that is not `bytes` may change after this call returns.
        content = data if isinstance(data, bytes) else bytes(data)
        # A relay may hold a version before `latest.json` moves to it. Rollouts act on announcements
        # only, which come later: no trajectory has a version that was not believed.
        self._push.hand_over(key, content)
        if file_name_of(key) == MANIFEST:
            self._complete(version)
            return self._store.create(key, content)
        self._begin(version, key, content)
        return content_hash(content)

    def put(self, key: str, data: Data) -> str:
        return self._store.put(key, data)

    def swap(self, key: str, data: Data, etag: str) -> str:
        return self._store.swap(key, data, etag)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._wait(key)
        return self._store.get(key, start, end)

    def stat(self, key: str) -> ObjectStat:
        self._wait(key)
        return self._store.stat(key)

    def read(self, key: str) -> tuple[bytes, str]:
        self._wait(key)
        return self._store.read(key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        self._wait()
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._wait(key)
        self._store.delete(key)

    def delete_all(self, keys: Iterable[str]) -> None:
        self._wait()
        self._store.delete_all(keys)

    def settle(self) -> None:
        """Returns once every object created so far is stored; pushes are not awaited. Raises the
        first upload error.
        """
        with self._lock:
            versions = sorted(self._uploads)
        for version in versions:
            self._complete(version)

    def metric_values(self) -> MetricValues:
        return self._push.metric_values()

    def _begin(self, version: Version, key: str, content: bytes) -> None:
        self._wait(key)
        if self._waiting() + len(content) > self._bytes_max:
            # All others end first, so that at most `bytes_max` bytes wait.
            self._wait()
        upload = self._pool.submit(create_idempotent, self._store, key, content)
        with self._lock:
            self._uploads.setdefault(version, {})[key] = len(content), upload
            for old in sorted(self._uploads)[:-VERSIONS_MAX]:
                del self._uploads[old]

    def _complete(self, version: Version) -> None:
        with self._lock:
            uploads = self._uploads.pop(version, {})
        errors = [error for _, upload in uploads.values() if (error := upload.exception())]
        if errors:
            raise errors[0]

    def _wait(self, key: str | None = None) -> None:
        with self._lock:
            uploads = [
                u
                for by_key in self._uploads.values()
                for k, u in by_key.items()
                if key in (None, k)
            ]
        for _, upload in uploads:
            upload.exception()

    def _waiting(self) -> int:
        with self._lock:
            uploads = [upload for by_key in self._uploads.values() for upload in by_key.values()]
        return sum(size for size, upload in uploads if not upload.done())
