"""Relays as real processes over one log and one store, and a stand-in for the trainer that
publishes raw objects as versions.
"""

import http.client
import json
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.storage.relay.client import BandwidthLimiter, token_header
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.manifest import (
    FileEntry,
    Manifest,
    TensorFiles,
    manifest_key,
    version_folder,
)
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from testbed.run_driver import RunDriver, RunProcess
from testbed.servers.guard import memory_folder
from testbed.waiting import WAIT_S, wait_for

RUN = "relays"


@dataclass(eq=False)
class RelayProcess(RunProcess):
    """One `rollstream relay`; `folder` is its shared memory."""

    folder: Path = Path()

    @property
    def url(self) -> str:
        wait_for(lambda: (self.folder / "url").exists() or self.is_over)
        assert not self.is_over, self.describe()
        return (self.folder / "url").read_text()

    def status(self) -> dict[str, Any]:
        host = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=WAIT_S)
        try:
            connection.request("GET", "/status", headers=token_header())
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def figure(self, name: str) -> int:
        return self.status()["figures"][f"relay_{name}"]

    def has(self, version: Version) -> bool:
        return str(version) in self.status()["versions"]

    def receives(self, key: str, at_least: int) -> bool:
        return self.status()["receiving"].get(key, [0])[0] >= at_least


@dataclass
class RelayNet:
    """One run's log and store with its relays; `settings` are of `[relay]`."""

    folder: Path
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    store_url: str = ""
    relays: list[RelayProcess] = field(default_factory=list[RelayProcess])

    def __post_init__(self) -> None:
        self.store_url = self.store_url or f"file:{self.folder / 'store'}"
        self.bus: Bus = open_bus(f"sqlite:{self.folder / 'bus'}")
        self.bus.create(catalogue())
        self.store: ObjectStore = open_store(self.store_url)
        memory = memory_folder()
        assert memory is not None, "relays need /dev/shm"
        self.memory = Path(memory, f"relays-{secrets.token_hex(4)}")
        self.trainer(1)

    def __enter__(self) -> "RelayNet":
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self.relays:
            if not relay.is_over:
                relay.send_signal(signal.SIGCONT)
                relay.send_signal(signal.SIGTERM)
        for relay in self.relays:
            try:
                relay.wait(None)
            except subprocess.TimeoutExpired:
                relay.kill()
        shutil.rmtree(self.memory, ignore_errors=True)
        self.bus.close()

    def trainer(self, term: int) -> None:
        """The next trainer: its announcements fence lower terms."""
        self.term = term
        self.writer = FencedWriter(self.bus, "weights", "trainer", term)
        self.writer.open()

    def start(self, *names: str, **changed: object) -> list[RelayProcess]:
        """Starts relays in this order of their terms; returns when they serve."""
        started = [self._start(name, {**self.settings, **changed}) for name in names]
        for relay in started:
            wait_for(lambda relay=relay: relay.status()["url"])
        return started

    def start_chain(self, *names: str, **changed: object) -> list[RelayProcess]:
        """Starts them one after the other, so that each reads from the one before."""
        return [relay for name in names for relay in self.start(name, **changed)]

    def store_for(self, relay: RelayProcess) -> RelayStore:
        return RelayStore(self.store, relay.folder)

    def pushing(self, bytes_max: int = 1 << 30, bytes_per_s: float = 0) -> PushingStore:
        directory = RelayDirectory(self.bus, WAIT_S)
        return PushingStore(self.store, directory, bytes_max, BandwidthLimiter(bytes_per_s))

    def write(
        self,
        number: int,
        files: Mapping[str, bytes],
        store: ObjectStore | None = None,
        parent: Version | None = None,
    ) -> Manifest:
        """A complete version, not announced."""
        version, store = Version(number, self.term), store or self.store
        for name, data in files.items():
            store.create(f"{version_folder(version)}/{name}", data)
        manifest = manifest_of(version, files, parent)
        store.create(manifest_key(version), encode_json(manifest))
        return manifest

    def announce(self, manifest: Manifest) -> Version:
        version = manifest.version
        record = WeightsAnnounced(
            RUN, version, manifest_key(version), manifest.hash, "anchor", None, 0, time.time()
        )
        self.writer.append([(RUN, record)])
        return version

    def publish(self, number: int, files: Mapping[str, bytes]) -> Version:
        return self.announce(self.write(number, files))

    def _start(self, name: str, settings: Mapping[str, object]) -> RelayProcess:
        configuration = self.folder / "run.toml"
        configuration.write_text(f'run = "{RUN}"\n[metrics]\nenabled = false\n')
        folder = self.memory / name
        places = {
            "bus": f"sqlite:{self.folder / 'bus'}",
            "store": self.store_url,
            "relay.folder": str(folder),
            "relay.enabled": "true",
            **{f"relay.{key}": str(value) for key, value in settings.items()},
        }
        places = [f"{key}={value}" for key, value in places.items()]
        (folder / "url").unlink(missing_ok=True)
        started = RunDriver(self.folder / "run", configuration, places).start(name, command="relay")
        relay = RelayProcess(name, started.process, started.log, started.begin, folder)
        self.relays.append(relay)
        wait_for(lambda: relay.url)
        return relay


def manifest_of(
    version: Version, files: Mapping[str, bytes], parent: Version | None = None
) -> Manifest:
    """A manifest that names these files and no tensors; relays do not read tensor entries."""
    entries = tuple(FileEntry(name, len(data), content_hash(data)) for name, data in files.items())
    kind = "anchor" if parent is None else "delta"
    anchor = version if parent is None else parent
    weights = TensorFiles(entries, {}, {})
    return Manifest(RUN, version, parent, anchor, kind, 0.0, weights, ())
