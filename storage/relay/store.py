"""Reads weight versions for a rollout: from shared memory if the node's relay holds them verified,
from the relay while it receives them, else from the object store (the bucket).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rollstream.metric_values import MetricValues
from rollstream.storage.relay.client import (
    CONNECT_S,
    RelayConnection,
    RelayLost,
    RelayRefused,
    body_length,
)
from rollstream.storage.relay.object import URL_FILE, version_of
from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore
from rollstream.storage.stores.file import ForeignFile, open_own

log = logging.getLogger(__name__)

WAIT_S = 2.0  # one request waits this long for an object that is arriving
STALLED_S = 75.0
"""The bucket is read after so long without a byte. The relay reads it too, after
`relay.patience_s`; if it cannot, the site's network is probably cut.
"""
SILENCE_S = 3.0  # a relay that sends no byte of a response for this long is lost
RELAY_RETRY_S = 5.0  # a lost relay is tried again after this
CONNECTIONS_MAX = 4
URL_BYTES_MAX = 4096
PIECE_BYTES = 32 << 20


class RelayStore:
    """`get` of a version's objects tries the relay first; all other calls go to `store`. Threads
    may share it. `folder` is the relay's, and names its address unless `url` is given.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        url: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._folder, self._url, self._clock = store, folder, url, clock
        self._lock = threading.Lock()
        self._connections: list[RelayConnection] = []
        self._lost_s = float("-inf")
        self._is_lost = False
        self.relay_bytes = 0

    def metric_values(self) -> MetricValues:
        return {"rollout_relay_bytes_total": self.relay_bytes}

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = None
        if version_of(key) is not None:
            data = self._from_memory(key, start, end)
            if data is None:
                data = self._from_relay(key, start, end)
        if data is None:
            return self._store.get(key, start, end)
        with self._lock:
            self.relay_bytes += len(data)
        return data

    def read(self, key: str) -> tuple[bytes, str]:
        """Read from the bucket, whose etag `swap` compares."""
        return self._store.read(key)

    def put(self, key: str, data: Data) -> str:
        return self._store.put(key, data)

    def create(self, key: str, data: Data) -> str:
        return self._store.create(key, data)

    def swap(self, key: str, data: Data, etag: str) -> str:
        return self._store.swap(key, data, etag)

    def stat(self, key: str) -> ObjectStat:
        return self._store.stat(key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def delete_all(self, keys: Iterable[str]) -> None:
        self._store.delete_all(keys)

    def _from_memory(self, key: str, start: int, end: int | None) -> bytes | None:
        """None if the object is not there; an evicted one is read to its end."""
        try:
            with os.fdopen(open_own(self._folder / key), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(start)
                length = max(0, min(size, size if end is None else end) - start)
                data = file.read(length)
                while len(data) < length:  # one read returns 2 GiB at most
                    data += file.read(length - len(data))
                return data
        except ForeignFile as error:
            self._note_lost(error)
        except OSError:  # the object is not there, or not yet
            pass
        return None

    def _from_relay(self, key: str, start: int, end: int | None) -> bytes | None:
        if self._clock() - self._lost_s < RELAY_RETRY_S or end == start:
            return None
        progress, moved_s = "", self._clock()
        try:
            while True:
                data, arriving = self._request(key, start, end)
                self._is_lost = False
                if data is not None or arriving is None:
                    return data
                data = self._from_memory(key, start, end)
                if data is not None:
                    return data
                if arriving != progress:
                    progress, moved_s = arriving, self._clock()
                if self._clock() - moved_s > STALLED_S:
                    raise RelayLost(f"the relay received nothing for {STALLED_S:g} s")
        except (RelayLost, RelayRefused) as error:
            self._note_lost(error)
            return None

    def _request(self, key: str, start: int, end: int | None) -> tuple[bytes | None, str | None]:
        """Returns the bytes; or, while the object arrives, a text that changes with the relay's
        progress; or None twice.
        """
        connection = self._take_connection()
        if connection is None:
            return None, None
        try:
            headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
            target = f"/{key}?wait={WAIT_S:g}"
            status, answer = connection.request("GET", target, headers, WAIT_S + CONNECT_S)
            if status in (200, 206):
                data = _body(connection, body_length(answer))
            elif status in (404, 416):
                data = None if status == 404 else b""
            else:
                raise RelayRefused(status, f"relay {connection.url}: status {status} for {key}")
        except BaseException:
            connection.close()
            raise
        self._return_connection(connection)
        return data, answer.get("x-coming") if data is None else None

    def _take_connection(self) -> RelayConnection | None:
        url = self._url or self._url_in_folder()
        with self._lock:
            while self._connections:
                connection = self._connections.pop()
                if connection.url == url and connection.is_open():
                    return connection
                connection.close()
        return RelayConnection(url) if url else None

    def _url_in_folder(self) -> str:
        try:
            with os.fdopen(open_own(self._folder / URL_FILE), "rb") as file:
                return file.read(URL_BYTES_MAX).decode("ascii")
        except ForeignFile as error:
            self._note_lost(error)
        except (OSError, UnicodeDecodeError):
            pass
        return ""

    def _return_connection(self, connection: RelayConnection) -> None:
        with self._lock:
            if len(self._connections) < CONNECTIONS_MAX:
                self._connections.append(connection)
                return
        connection.close()

    def _note_lost(self, error: Exception) -> None:
        self._lost_s = self._clock()
        if not self._is_lost:
            log.warning("versions are read from the bucket: %s", error)
        self._is_lost = True


def _body(connection: RelayConnection, size: int) -> bytes:
    # Memory is taken as bytes arrive: the size is only the relay's statement.
    pieces: list[bytearray] = []
    for begin in range(0, size, PIECE_BYTES):
        piece, at = bytearray(min(PIECE_BYTES, size - begin)), 0
        with memoryview(piece) as view:
            while at < len(piece):
                count = connection.receive_into(view[at:], SILENCE_S)
                if not count:
                    raise RelayLost(f"relay {connection.url}: silent in the middle of a response")
                at += count
        pieces.append(piece)
    return b"".join(pieces)
