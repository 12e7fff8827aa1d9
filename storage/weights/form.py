"""What a version is in the store (`VersionForm`), and the forms by their names (`FORMS`): whole
weights, as anchors and deltas, or the LoRA adapter of a base that never changes.

The tensors that are published name their form (`form_of_tensors`), a manifest has it by its kind
(`form_of`). A form is imported when it is looked up.
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
    """Holds what all versions of one term of a run are published with. Of several ranks that share
    a model one leads: only it writes manifests and files that all have alike.
    """

    store: ObjectStore
    run: str
    settings: WeightsSettings
    model_files: Mapping[str, bytes]
    clock: Callable[[], float]
    leads: bool


class FormPublisher(ABC):
    """Publishes the versions of one term. The tensors of the last version do not change until the
    next call of `publish` has returned.
    """

    @abstractmethod
    def publish(self, version: Version, tensors: Tensors, parent: Manifest | None) -> Manifest:
        """Write the version's objects, its manifest last; returns the manifest. `parent` is the
        believed version. Idempotent: a writer that was killed half-way calls it again and finds its
        own objects.
        """

    def believed(self, manifest: Manifest, tensors: Tensors) -> None:  # noqa: B027
        """The pointer moved to the version that `publish` returned."""

    def repeated(self, tensors: Tensors, is_same: bool) -> None:  # noqa: B027
        """A step repeated the believed version after a crash, with equal bytes or with others. In
        the second case the next version must not depend on the believed one's bytes.
        """


@dataclass(frozen=True, slots=True)
class OpeningTensors:
    """Holds what an engine is opened with. If `version` is not the fetched one, the engine takes
    the fetched one as an update afterwards.
    """

    version: Version
    tensors: Mapping[str, torch.Tensor]


class VersionForm(ABC):
    """Says how versions of a form are published, opened, and made one model."""

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
        streams: bool,
    ) -> OpeningTensors:
        """Returns what an engine is opened with before it serves this version, whose own `tensors`
        are fetched. What has to be fetched besides is verified, and decoded a tensor at a time if
        the engine `streams`.
        """
        return OpeningTensors(manifest.version, tensors)

    def model_tensors(
        self, store: ObjectStore, manifest: Manifest, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the weights of the version as one model, from its own `tensors`."""
        return tensors

    def scaling(self, manifest: Manifest) -> float | None:
        """Returns the factor of an adapter's product (alpha / rank); None for other forms."""
        return None


@cache
def _form(name: str) -> VersionForm:
    form: type[VersionForm] = load_option(FORMS[name])
    return form()


def form_of(manifest: Manifest) -> VersionForm:
    """Returns the form of a published version."""
    return _form(_OF_KIND.get(manifest.kind, manifest.kind))


def form_of_tensors(tensors: Tensors) -> VersionForm:
    """Returns the form in which these tensors are published: the one that their attribute `form`
    names, `whole` without one.
    """
    return _form(getattr(tensors, "form", "whole"))
