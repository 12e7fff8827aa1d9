"""How a rollout holds the served version while it fetches the next one (`WeightHolder`), and the
ways by name (`HOLDERS`).

The engine's kind names the way for large versions (`EngineKind.large_weights`); small ones and
adapters are `resident` in this process. A way is imported when chosen.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import ClassVar, Protocol, Self, TypeVar

import torch

from rollstream.import_path import load_option
from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.merged_update import merged_update
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.resident import ResidentUpdate, ResidentWeights
from rollstream.streams.values import Version

HOLDERS: Mapping[str, str] = {
    "resident": "rollstream.producers.rollout.holder:ResidentHolder",
    "mapped": "rollstream.producers.rollout.holders.mapped:MappedHolder",
    "streamed": "rollstream.producers.rollout.holders.streamed:StreamedHolder",
}
"""The values of `EngineKind.large_weights`, each with its class as `module:class`."""


class Fetched(Protocol):
    """What a fetch returns to be counted."""

    @property
    def fetched_bytes(self) -> int: ...


_F = TypeVar("_F", bound=Fetched)


@dataclass(slots=True)
class FetchMeter:
    """Counts the bytes of the fetches, and their seconds by `timer`."""

    timer: Callable[[], float] = monotonic
    fetched_bytes: int = 0
    fetch_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))

    def count(self, fetch: Callable[[], _F]) -> _F:
        """Returns what `fetch` returns; counts nothing if it raises."""
        started = self.timer()
        fetched = fetch()
        self.fetch_s.add(self.timer() - started)
        self.fetched_bytes += fetched.fetched_bytes
        return fetched


@dataclass(frozen=True, slots=True)
class Fetch:
    """What to fetch: the `version` from `store`, with its manifest's hash if it was announced.
    `prepare` is the engine's preparation of an update; `skipped` an earlier update that the engine
    never took.
    """

    store: ObjectStore
    version: Version
    manifest_hash: str | None
    prepare: Callable[[WeightUpdate], WeightUpdate]
    meter: FetchMeter
    skipped: WeightUpdate | None = None


class WeightHolder(ABC):
    """Holds one version's tensors and turns them into the next one's. Used by one thread at a time;
    `update` never runs beside a comparison of the tensors that it returned before.
    """

    @abstractmethod
    def update(self, fetch: Fetch) -> tuple[Manifest, WeightUpdate]:
        """Returns the version's manifest and the prepared update from the served version, every
        tensor verified, and leaves what the engine serves unchanged. Starts over from any state,
        also after an error. Raises `ObjectMissing` and `CorruptObject` (with the object's name) and
        the store's errors.
        """

    def renewed(self) -> Self:
        """Returns an empty holder of the same way, in new memory."""
        return type(self)()

    def note_taken(self, update: WeightUpdate) -> None:  # noqa: B027  most holders need not know
        """The rollout gives this update to the engine next."""

    def note_served(self, version: Version | None) -> None:  # noqa: B027
        """The engine serves this version, none for None."""

    def sizes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Returns the size in bytes of each tensor of an update of this holder."""
        return {name: tensor.nbytes for name, tensor in tensors.items()}

    def damaged(
        self, tensors: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> tuple[str, ...]:
        """Returns those of the `names` whose held bytes no longer match their hashes, where the
        engine reads the same bytes and comparing it with them would find nothing.
        """
        return ()


class WeightCopy(Protocol):
    """One version's tensors by all names, which `update` makes another version's, in place."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    def update(
        self, store: ObjectStore, target: Version, manifest_hash: str | None = None
    ) -> ResidentUpdate: ...


class CopyHolder(WeightHolder):
    """Keeps a copy beside the engine's own."""

    copy: ClassVar[type[WeightCopy]]

    def __init__(self) -> None:
        self._copy = self.copy()

    def update(self, fetch: Fetch) -> tuple[Manifest, WeightUpdate]:
        moved = fetch.meter.count(
            lambda: self._copy.update(fetch.store, fetch.version, fetch.manifest_hash)
        )
        manifest = moved.manifest
        update = WeightUpdate(
            manifest.version,
            self._copy.tensors,
            moved.base,
            moved.patches,
            moved.whole,
            scaling=form_of(manifest).scaling(manifest),
        )
        # The copy moved on from the skipped version, which the engine does not serve.
        update = update if fetch.skipped is None else merged_update(fetch.skipped, update)
        return manifest, fetch.prepare(update)


class ResidentHolder(CopyHolder):
    """Keeps the copy in this process's memory."""

    copy = ResidentWeights


def open_holder(manifest: Manifest, large: str, large_above: int) -> WeightHolder:
    """Returns the holder for a run whose first version has this manifest: of the way `large` for a
    full model above `large_above` bytes.
    """
    is_large = manifest.full_bytes > large_above and not form_of(manifest).is_partial
    holder: type[WeightHolder] = load_option(HOLDERS[large if is_large else "resident"])
    return holder()
