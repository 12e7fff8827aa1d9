"""The forms of versions: whole weights, as anchors and deltas, or the LoRA adapter of a fixed base.
`FORMS` imports a form when it is looked up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from rollstream.import_path import load_option
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.tensors import Tensors
from rollstream.streams.values import Version

FORMS: Mapping[str, str] = {
    "whole": "rollstream.storage.weights.whole:WholeForm",
    "adapter": "rollstream.storage.weights.adapters:AdapterForm",
}
"""The forms by name, each with its class as `module:class`."""
_OF_KIND = {"anchor": "whole", "delta": "whole"}  # every other kind is a form's name


@dataclass(frozen=True, slots=True)
class Publication:
    """Of several ranks that share a model one leads: only it writes manifests and files that are
    equal on all ranks.
    """

    store: ObjectStore
    run: str
    settings: WeightsSettings
    model_files: Mapping[str, bytes]
    clock: Callable[[], float]
    leads: bool


class FormPublisher(ABC):
    """The last version's tensors do not change until the next `publish` has returned."""

    @abstractmethod
    def publish(
        self, version: Version, tensors: Tensors, parent: Manifest | None, is_fork: bool = False
    ) -> Manifest:
        """Writes the version, its manifest last; `parent` is the believed version. Idempotent, also
        after a kill half-way. With `is_fork` the trainer has repeated the believed version's step
        with other bytes, so this version must not depend on the believed one's.
        """

    def believed(self, manifest: Manifest, tensors: Tensors) -> None:  # noqa: B027
        """The pointer moved to the version that `publish` returned."""

    def repeated(self, tensors: Tensors) -> None:  # noqa: B027
        """A step repeated the believed version, with equal bytes, after a crash."""


@dataclass(frozen=True, slots=True)
class OpeningTensors:
    """If `version` is not the fetched one, the engine then takes the fetched one as an update."""

    version: Version
    tensors: Mapping[str, torch.Tensor]


class VersionForm(ABC):
    """Publishes and opens the versions of one form, and makes each one model."""

    is_partial: ClassVar[bool] = False
    """Whether a version's own tensors are no model without its base."""

    @abstractmethod
    def publisher(self, publication: Publication) -> FormPublisher:
        """Returns the publisher of one term's versions."""

    def opening(
        self,
        store: ObjectStore,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
    ) -> OpeningTensors:
        """Returns the verified tensors, beside the fetched `tensors` of this version, with which an
        engine is opened.
        """
        return OpeningTensors(manifest.version, tensors)

    def model_tensors(
        self, store: ObjectStore, manifest: Manifest, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the weights of the version as one model, from its own `tensors`."""
        return tensors

    def scaling(self, manifest: Manifest) -> float | None:
        """Returns alpha / rank of an adapter; None for other forms."""
        return None


@cache
def _form(name: str) -> VersionForm:
    form: type[VersionForm] = load_option(FORMS[name])
    return form()


def form_of(manifest: Manifest) -> VersionForm:
    return _form(_OF_KIND.get(manifest.kind, manifest.kind))


def form_of_tensors(tensors: Tensors) -> VersionForm:
    """Returns the form that the tensors' attribute `form` names, `whole` without one."""
    return _form(getattr(tensors, "form", "whole"))
