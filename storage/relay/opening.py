"""Opens what a relay is to a rollout (`open_source`) and to the trainer (`open_hook`)."""

from pathlib import Path

from rollstream.storage.relay.client import BandwidthLimiter
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.settings import RelaySettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus


def open_source(store: ObjectStore, settings: RelaySettings, folder: Path) -> RelayStore:
    """Returns a store that reads versions through this node's relay, whose folder is given."""
    return RelayStore(store, folder, settings.url)


def open_hook(store: ObjectStore, bus: Bus, settings: RelaySettings) -> PushingStore:
    """Returns a store that sends new versions to the first of the run's relays, which read from
    each other in a chain.
    """
    directory = RelayDirectory(bus, settings.timeout_s, site=settings.site)
    pace = BandwidthLimiter(settings.send_bytes_per_s)
    return PushingStore(store, directory, settings.push_bytes_max, pace)
