"""Reads past versions for the policies of a loss (`PublishedVersions`; `trainer.reference`,
`trainer.proximal`), and names those that must be kept for it (`NeededVersions`): a trainer that
resumes from a kept checkpoint, or a replay from there, reads them again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollstream.consumers.objective_settings import past_policies, versions_needed
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.credit import scored_reference
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.storage.checkpoints import stored_checkpoints
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class PublishedVersions:
    """Implements `learn.other_policies.PastVersions` over the stores that `stores` opens when a
    version is read: the first that has a version of a number gives it; the last is that of the run
    whose rollouts emitted the trained tokens. All versions are published as `dtype`.
    """

    stores: Callable[[], Sequence[ObjectStore]]
    dtype: str

    def read(self, number: int, term: int | None = None) -> Mapping[str, Tensor]:
        """Returns the verified weights of the believed version of this number, or, if a term is
        given, of this version that emitted tokens. Raises `ConfigurationError` if it is not whole.

        Of several terms the highest published the believed version: a term publishes a number only
        if no version of that number or a higher one is believed, and then no lower term can.
        """
        stores = self.stores()
        for store in stores if term is None else stores[-1:]:
            versions = [v for v in listed_versions(store) if v.number == number]
            for version in sorted(versions, reverse=True):
                if term is None or version.term == term:
                    weights = ResidentWeights()
                    try:
                        weights.update(store, version)
                    except ObjectMissing:  # its writer died before the manifest, or it was deleted
                        continue
                    return weights.tensors
        raise ConfigurationError(
            f"trainer.reference or trainer.proximal: version {number} is needed and no longer "
            "stored; raise weights.versions_max (a fork has no versions of its parent: fork at a "
            "step whose reference is that step's own version, or version 0)"
        )


@dataclass(frozen=True, slots=True)
class NeededVersions:
    """Returns, when called, the versions that the objective in `settings` needs to continue from
    any stored checkpoint, or from the believed version on. Empty where it needs none.
    """

    store: ObjectStore
    settings: TrainerSettings
    max_lag: int | None

    def __call__(self) -> set[Version]:
        policies = {*past_policies(self.settings), scored_reference(self.settings)}
        if not policies - {"v0", ""}:
            return set()
        # Read before the listing: a checkpoint is written before the version after it is believed.
        pointer = believed_pointer(self.store)
        steps = {stored.id.step for stored in stored_checkpoints(self.store)}
        if pointer is not None and pointer.version is not None:
            steps.add(pointer.version.number)
        numbers = versions_needed(self.settings, steps, self.max_lag)
        return {version for version in listed_versions(self.store) if version.number in numbers}
