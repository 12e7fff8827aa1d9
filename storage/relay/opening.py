"""Opens a relay for a rollout (`open_source`) and for the trainer (`open_hook`)."""

from pathlib import Path

from rollstream.storage.relay.client import BandwidthLimiter
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.settings import RelaySettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus


def open_source(store: ObjectStore, settings: RelaySettings, folder: Path) -> RelayStore:
    return RelayStore(store, folder, settings.url)


def open_hook(store: ObjectStore, bus: Bus, settings: RelaySettings) -> PushingStore:
    directory = RelayDirectory(bus, settings.timeout_s, site=settings.site)
    pace = BandwidthLimiter(settings.send_bytes_per_s)
    return PushingStore(store, directory, settings.push_bytes_max, pace)
