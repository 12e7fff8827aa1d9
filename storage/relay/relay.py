"""One relay, a node's cache of weight versions: `RelayIntake` fills it, `RelayServer` serves it,
`Relay` follows the log and publishes heartbeats.
"""

import fcntl
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollstream.errors import BusError, ConfigurationError, Fenced
from rollstream.metric_values import MetricValues
from rollstream.os_failures import explain_os_error
from rollstream.storage.relay.bucket import BucketReader
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import BandwidthLimiter, needed_token
from rollstream.storage.relay.intake import RelayIntake
from rollstream.storage.relay.object import URL_FILE
from rollstream.storage.relay.server import RelayServer
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.settings import RelaySettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import RELAY_TERMS, RELAYS, next_term
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Opened, RelayStatus, WeightsAnnounced
from rollstream.streams.values import Version
from rollstream.streams.writer import publish

log = logging.getLogger(__name__)

POLL_S = 0.05  # between two reads of the log


class Relay:
    """`folder` holds the cached objects, where the node's rollouts open them, its URL and a lock:
    only one relay uses it. `name` must be unique among the living relays.
    """

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        settings: RelaySettings,
        name: str,
        folder: Path,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._settings, self._wall = bus, settings, wall
        self.name, self.folder = name, folder
        self._lock = _lock_folder(folder)
        self.cache = RelayCache(folder, settings.versions, settings.bytes_max)
        self.cache.bytes_max = _fitting_bytes(folder, settings.bytes_max)
        self.url = ""
        self.term = next_term(store, RELAYS, RELAY_TERMS)
        self._weights = TopicReader(bus, "weights", from_begin(bus, "weights"), with_opened=True)
        self.directory = RelayDirectory(bus, settings.timeout_s, site=settings.site)
        bucket = BucketReader(self.cache, store)
        self.intake = RelayIntake(
            self.cache,
            bucket,
            self.directory,
            self.term,
            settings.patience_s,
            lambda version: self.server.pushed_s(version),
        )
        self._published: tuple[object, ...] = ()
        self._published_s = self._followed_s = float("-inf")
        self._failed: BaseException | None = None
        self.server = _start_server(settings, self.cache, self.status)
        self.url = settings.url or _url(settings.host, self.server.port)
        local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        # For processes of this node.
        (folder / URL_FILE).write_text(_url(local_host, self.server.port))

    def run(self, stop: threading.Event) -> None:
        """Raises the error that ended the intake, or `Fenced` if a relay of a higher term has the
        same name.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._take_in, args=(ended,), name="relay-intake")
        try:
            self._poll()
            thread.start()
            while self._failed is None and not stop.wait(POLL_S):
                self._poll()
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            self.close()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Publish a status without URL, so that others know; stop the server, and free the
        memory.
        """
        try:
            self._publish_status("")
        except BusError as error:
            log.warning("the log does not answer: %s", error)
        self.server.end()
        self.cache.close()
        self._lock.close()

    def status(self) -> dict[str, Any]:
        objects = self.cache.objects()
        return {
            "relay": self.name,
            "term": self.term,
            "url": self.url,
            "upstream": self.intake.upstream,
            "versions": [str(version) for version in self.cache.versions()],
            "announced": [str(version) for version in sorted(self.cache.announced())[-8:]],
            "receiving": {o.key: [o.written, o.offer.bytes] for o in objects if not o.verified},
            "figures": self.metric_values(),
        }

    def metric_values(self) -> MetricValues:
        newest = max(self.cache.versions(), default=Version(0, 0))
        counted = {name: self.cache.counters[name] for name in COUNTERS}
        return {
            **counted,
            "relay_term": self.term,
            "relay_held_bytes": self.cache.bytes(),
            "relay_versions": len(self.cache.versions()),
            "relay_version_newest": newest.number,
            "relay_place": sum(m.term < self.term for m in self.directory.members()),
        }

    def readers(self) -> list[TopicReader]:
        return [self._weights, self.directory.reader]

    def _take_in(self, ended: threading.Event) -> None:
        try:
            self.intake.run(ended)
        except BaseException as error:
            log.exception("the relay's intake failed")
            self._failed = error

    def _poll(self) -> None:
        try:
            self.follow()
        except BusError as error:  # continue to serve the cache, which is better than a restart
            log.warning("the log does not answer: %s", error)

    def follow(self) -> None:
        """Applies new announcements and heartbeats. Raises `Fenced` as `run`, and `BusError` while
        the log does not answer.
        """
        for received in self._weights.poll(0.0):
            if isinstance(received.record, Opened):
                self.cache.note_opened(received.record.term)
            elif isinstance(received.record, WeightsAnnounced):
                envelope = received.envelope
                term = envelope.term if envelope else received.record.version.term
                self.cache.announce(received.record, term)
        silence_s = time.monotonic() - self._followed_s
        self.directory.poll(log_was_silent=silence_s > self._settings.timeout_s / 4)
        self._check_term()
        now = self._followed_s = time.monotonic()
        self.cache.drop_stalled(now)
        state = (tuple(self.cache.versions()), self.intake.upstream)
        if state != self._published or now - self._published_s >= self._settings.status_s:
            self._published, self._published_s = state, now
            self._publish_status(self.url)

    def _check_term(self) -> None:
        newest = self.directory.term_of(self.name)
        if newest > self.term:
            # This process stood still, and a later start of its name replaced it.
            raise Fenced(
                f"relay {self.name} of term {self.term} was replaced in term {newest}; this "
                "process must exit. If two run on purpose, give each a name of its own (--name)"
            )

    def _publish_status(self, url: str) -> None:
        record = RelayStatus(
            relay=self.name,
            term=self.term,
            node=socket.gethostname(),
            url=url,
            versions=tuple(self.cache.versions()),
            upstream=self.intake.upstream,
            time_s=self._wall(),
            site=self._settings.site,
        )
        publish(self._bus, "status", f"{self.name}/{self.term}", record)


# Metrics that the cache, the intake and the server count (`RelayCache.add`).
COUNTERS = (
    "relay_received_bytes_total",
    "relay_pushed_bytes_total",
    "relay_bucket_bytes_total",
    "relay_sent_bytes_total",
    "relay_wrong_total",
    "relay_evicted_total",
)


def _fitting_bytes(folder: Path, bytes_max: int) -> int:
    # Older versions are evicted before the file system is full. Docker gives a container 64 MiB of
    # shared memory by default.
    free = shutil.disk_usage(folder).free
    if free < bytes_max:
        log.warning(
            "relay.bytes_max is %.2f GB, but %s has %.2f GB free, and the relay keeps at most "
            "that; lower relay.bytes_max, or give this machine more shared memory (Docker: "
            "--shm-size)",
            bytes_max / 1e9,
            folder,
            free / 1e9,
        )
    return min(free, bytes_max)


def _lock_folder(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (folder / "lock").open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"another relay uses {folder}: one per node and run, or give it a relay.folder"
        raise ConfigurationError(message) from None
    except OSError as error:
        raise ConfigurationError(f"relay.folder {folder}: {explain_os_error(error)}") from None
    if folder.stat().st_uid != os.getuid():
        raise ConfigurationError(f"relay.folder {folder} belongs to another user")
    return file


def _start_server(
    settings: RelaySettings, cache: RelayCache, status: Callable[[], dict[str, Any]]
) -> RelayServer:
    address, pace = (settings.host, settings.port), BandwidthLimiter(settings.send_bytes_per_s)
    token = needed_token(settings.host)
    try:
        return RelayServer(address, cache, pace, settings.connections_max, status, token)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise ConfigurationError(
            f"relay.host, relay.port: cannot listen on {where}: {error}"
        ) from None


def _url(host: str, port: int) -> str:
    # A relay that listens on all addresses is reached by its machine's name.
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
