"""The relay as a role, and the stores of the roles beside it: rollouts read through it, the trainer
pushes to the chain. Without `[relay] enabled` both keep the store as it is.
"""

from dataclasses import replace
from pathlib import Path

from rollstream.roles.context import RoleContext
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.relay.pace import BandwidthLimiter
from rollstream.storage.relay.pushing import PushingStore
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.relay.relay import Relay
from rollstream.storage.relay.settings import folder_for


def build_relay(place: RoleContext) -> Relay:
    """This node's relay, under its next term."""
    settings = place.configuration.relay
    return Relay(place.bus, place.store, settings, place.name, _relay_folder(place))


def with_relay_reads(place: RoleContext) -> RoleContext:
    """The place with the node's relay in front of its store."""
    settings = place.configuration.relay
    if not settings.enabled:
        return place
    store = RelayStore(place.store, _relay_folder(place), settings.url)
    place.watch.offer(lambda: {"rollout_relay_bytes_total": store.relay_bytes})
    return replace(place, store=store)


def with_relay_push(place: RoleContext) -> RoleContext:
    """The place with the chain of relays behind its store."""
    settings = place.configuration.relay
    if not settings.enabled or not settings.push_bytes_max:
        return place
    directory, pace = RelayDirectory(place.bus, settings.timeout_s), BandwidthLimiter(settings.send_bytes_per_s)
    store = PushingStore(place.store, directory, settings.push_bytes_max, pace)
    place.watch.offer(store.figures)
    return replace(place, store=store)


def _relay_folder(place: RoleContext) -> Path:
    return folder_for(place.configuration.relay, place.folder)
