"""The ways of weight versions beside the object store: what a rollout reads them through
(`WeightSource`) and what the trainer writes them through (`PublishHook`). Both are stores, so who
reads and writes versions does not know them; `WEIGHT_SOURCES` and `PUBLISH_HOOKS` name them by
strings, so that a run without them imports none.

Neither promises anything that the object store does not: a version is whole once its manifest and
its files are there, and any of them may be read there at any time.
"""

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
    """A store that reads the objects of versions by a shorter way, and from the store behind it
    where that way fails; everything else is the store's.
    """

    def metric_values(self) -> MetricValues: ...


@runtime_checkable
class PublishHook(ObjectStore, Protocol):
    """A store that also sends the objects of new versions on while it writes them, and that may
    write them in the background.
    """

    def settle(self) -> None:
        """Returns once every object that was created so far is stored. Raises the first error of a
        write.
        """
        ...

    def metric_values(self) -> MetricValues: ...


def open_weight_source(
    store: ObjectStore, settings: RelaySettings, folder: Path
) -> WeightSource | None:
    """Returns the source that the settings ask for; None: versions are read from the store."""
    if not settings.enabled:
        return None
    opener: Callable[[ObjectStore, RelaySettings, Path], WeightSource]
    opener = load_option(WEIGHT_SOURCES["relay"])
    return opener(store, settings, folder)


def open_publish_hook(store: ObjectStore, bus: Bus, settings: RelaySettings) -> PublishHook | None:
    """Returns the hook that the settings ask for; None: versions are written to the store alone."""
    if not settings.enabled or not settings.push_bytes_max:
        return None
    opener: Callable[[ObjectStore, Bus, RelaySettings], PublishHook]
    opener = load_option(PUBLISH_HOOKS["relay"])
    return opener(store, bus, settings)


def settle(store: ObjectStore) -> None:
    """Returns once every object that was created so far is stored. A store that is no hook writes
    none in the background.
    """
    if isinstance(store, PublishHook):
        store.settle()
