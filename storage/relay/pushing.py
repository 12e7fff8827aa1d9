"""The trainer's store in front of the chain of relays: objects created under `weights/` go to the
head of the chain while they are uploaded.

Objects of a version are uploaded in the background, so a slow store does not delay the push of the
next object. Creating the manifest waits for all of them, so the manifest is still the last object
(invariant 6). The push guarantees nothing. Relays believe a version by its announcement, verify it
against the announced manifest, and read missing objects from the bucket. A push that does not fit,
fails, or finds no relay is given up; the trainer never waits for one. A relay may hold a version
before `latest.json` moves to it. Rollouts act on announcements only, which come later, so no
trajectory has a version that was not believed.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rollstream.storage.stores.json_objects import create_idempotent
from rollstream.storage.stores.hashing import content_hash
from rollstream.storage.stores.base import Data, ListedObject, ObjectStore, ObjectStat
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.relay.names_part import MANIFEST, file_name_of, version_of
from rollstream.storage.relay.pace import BandwidthLimiter
from rollstream.storage.relay.push import ChainPush
from rollstream.metric_values import MetricValues
from rollstream.streams.values import Version

UPLOADS_MAX = 4
VERSIONS_MAX = 4  # started and without a manifest; older ones were abandoned by their writer


class PushingStore:
    """`store`, with uploads and pushes in the background; at most `bytes_max` bytes wait for each.
    Threads may share it.

    `create` of a version's object returns before the object is stored; reading, listing and
    deleting wait for it. An upload error, including different content under the key, is raised by
    `create` of the manifest, which is then not stored.
    """

    def __init__(
        self, store: ObjectStore, directory: RelayDirectory, bytes_max: int, pace: BandwidthLimiter | None = None
    ) -> None:
        self._store, self._bytes_max = store, bytes_max
        self._push = ChainPush(directory, bytes_max, pace or BandwidthLimiter())
        self._pool = ThreadPoolExecutor(UPLOADS_MAX, "upload")
        self._lock = threading.Lock()
        self._uploads: dict[Version, dict[str, _Upload]] = {}

    def create(self, key: str, data: Data) -> str:
        version = version_of(key)
        if version is None:
            return self._store.create(key, data)
        # Content that is not `bytes` may change after this call returns.
        content = data if isinstance(data, bytes) else bytes(data)
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

    def figures(self) -> MetricValues:
        return self._push.figures()

    def _begin(self, version: Version, key: str, content: bytes) -> None:
        """Upload in the background. Waits while more than `bytes_max` bytes wait already."""
        self._wait(key)
        if self._waiting() + len(content) > self._bytes_max:
            self._wait()
        upload = self._pool.submit(create_idempotent, self._store, key, content)
        with self._lock:
            self._uploads.setdefault(version, {})[key] = _Upload(len(content), upload)
            for old in sorted(self._uploads)[:-VERSIONS_MAX]:
                del self._uploads[old]

    def _complete(self, version: Version) -> None:
        """Wait until all objects of this version are stored; raises the first upload error."""
        with self._lock:
            uploads = self._uploads.pop(version, {})
        errors = [error for one in uploads.values() if (error := one.done.exception())]
        if errors:
            raise errors[0]

    def _wait(self, key: str | None = None) -> None:
        """Wait for the upload of this object, or for all uploads, whether they fail or not."""
        with self._lock:
            uploads = [
                u for of in self._uploads.values() for k, u in of.items() if key in (None, k)
            ]
        for upload in uploads:
            upload.done.exception()

    def _waiting(self) -> int:
        with self._lock:
            uploads = [upload for of in self._uploads.values() for upload in of.values()]
        return sum(upload.bytes for upload in uploads if not upload.done.done())


@dataclass(frozen=True, slots=True)
class _Upload:
    bytes: int
    done: Future[str]
