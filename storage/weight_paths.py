"""Opens the ways of weight versions beside the object store, which promise no more than it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from rollstream.import_path import load_option
from rollstream.metric_values import MetricValues
from rollstream.storage.settings import RelaySettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus

WEIGHT_SOURCES: Mapping[str, str] = {"relay": "rollstream.storage.relay.opening:open_source"}
"""By name, `module:function` that opens the source: `(store, settings, folder) → WeightSource`."""
PUBLISH_HOOKS: Mapping[str, str] = {"relay": "rollstream.storage.relay.opening:open_hook"}
"""By name, `module:function` that opens the hook: `(store, bus, settings) → PublishHook`."""


class WeightSource(ObjectStore, Protocol):
    """Reads by a shorter way, or from the store behind it where that fails."""

    def metric_values(self) -> MetricValues: ...


@runtime_checkable
class PublishHook(ObjectStore, Protocol):
    """Sends the objects of new versions on while it writes them, perhaps in the background."""

    def settle(self) -> None:
        """Wait until every object created so far is stored; raises a write's first error."""
        ...

    def metric_values(self) -> MetricValues: ...


def open_weight_source(
    store: ObjectStore, settings: RelaySettings, folder: Path
) -> WeightSource | None:
    if not settings.enabled:
        return None
    opener: Callable[[ObjectStore, RelaySettings, Path], WeightSource]
    opener = load_option(WEIGHT_SOURCES["relay"])
    return opener(store, settings, folder)


def open_publish_hook(store: ObjectStore, bus: Bus, settings: RelaySettings) -> PublishHook | None:
    if not settings.enabled or not settings.push_bytes_max:
        return None
    opener: Callable[[ObjectStore, Bus, RelaySettings], PublishHook]
    opener = load_option(PUBLISH_HOOKS["relay"])
    return opener(store, bus, settings)


def settle(store: ObjectStore) -> None:
    # Any other store writes nothing in the background.
    if isinstance(store, PublishHook):
        store.settle()
