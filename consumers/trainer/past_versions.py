"""Past versions for the objective: read, and kept as long as a resumed trainer or a replay reads
them again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollstream.consumers.objective_settings import reads_versions, versions_needed
from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.checkpoints import stored_checkpoints
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class PublishedVersions:
    """Implements `learn.objective.PastVersions`: the first of `stores()` that has the number gives
    it, the last is that of the run whose rollouts emitted the trained tokens. All versions are
    published as `dtype`.
    """

    stores: Callable[[], Sequence[ObjectStore]]
    dtype: str

    def read(self, number: int, term: int | None = None) -> Mapping[str, Tensor]:
        """The verified weights of the believed version of this number, or of the one of `term`,
        which emitted tokens. Raises `ConfigurationError` if it is not stored whole.
        """
        stores = self.stores()
        for store in stores if term is None else stores[-1:]:
            versions = [v for v in listed_versions(store) if v.number == number]
            # Of several terms the highest published the believed version: a term publishes a number
            # only if no version of that number or a higher one is believed, and then no lower term
            # can.
            for version in sorted(versions, reverse=True):
                if term is None or version.term == term:
                    try:
                        return fetch_tensors(store, version)[1]
                    except ObjectMissing:  # its writer died before the manifest, or it was deleted
                        continue
        raise ConfigurationError(
            f"trainer.reference or trainer.proximal: version {number} is needed and no longer "
            "stored; raise weights.versions_max (a fork has no versions of its parent: fork at a "
            "step whose reference is that step's own version, or version 0)"
        )


@dataclass(frozen=True, slots=True)
class NeededVersions:
    """What the objective needs to continue from any stored checkpoint or from the
    believed version.
    """

    store: ObjectStore
    settings: TrainerSettings
    max_lag: int | None

    def __call__(self) -> set[Version]:
        if not reads_versions(self.settings):
            return set()
        # Read before the listing: a checkpoint is written before the version after it is believed.
        pointer = believed_pointer(self.store)
        steps = {stored.id.step for stored in stored_checkpoints(self.store)}
        if pointer is not None and pointer.version is not None:
            steps.add(pointer.version.number)
        numbers = versions_needed(self.settings, steps, self.max_lag)
        return {version for version in listed_versions(self.store) if version.number in numbers}
