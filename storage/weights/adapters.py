"""The versions of a LoRA adapter: complete folders for PEFT, over a base that is stored once."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.storage.model_folder.hf_folder import ADAPTER_CONFIG, ADAPTER_TENSORS
from rollstream.storage.model_folder.lora import merge_adapter
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import create_idempotent
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.form import (
    FormPublisher,
    OpeningTensors,
    Publication,
    VersionForm,
)
from rollstream.storage.weights.manifest import (
    AdapterEntry,
    FileEntry,
    Manifest,
    TensorFiles,
    read_manifest,
)
from rollstream.storage.weights.mapped import MappedWeights
from rollstream.storage.weights.publish import NewVersion, complete_version, publish_version
from rollstream.storage.weights.shards import pack_tensors
from rollstream.storage.weights.tensors import Tensors, tensor_hashes
from rollstream.streams.values import Version

# No trainer has term 0, so the base itself is never announced or believed.
BASE = Version(0, 0)


class AdapterTensors(dict[str, torch.Tensor]):
    """Under PEFT's names. `base` returns the base's tensors in the published dtype:
    `DistributedTensors` if ranks share the model.
    """

    form: ClassVar[str] = "adapter"

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: bytes,
        scaling: float,
        base: Callable[[], Tensors],
    ) -> None:
        super().__init__(tensors)
        self.config, self.scaling, self.base = config, scaling, base


def publish_base(
    store: ObjectStore,
    run: str,
    tensors: Tensors,
    model_files: Mapping[str, bytes],
    shard_bytes: int,
    created_s: float,
    leads: bool = True,
) -> Manifest:
    """Write the base, or compare `tensors` with the stored one. With `leads` False a rank writes
    its part and no manifest. Raises `ConfigurationError` if the stored base is another one.
    """
    present = _stored_base(store)
    # Each rank waits here for all others, so none completes the base before all have looked for it.
    hashes = tensor_hashes(tensors)
    if present is None:
        new = NewVersion(run, BASE, tensors, model_files, shard_bytes, created_s, leads)
        return publish_version(store, new)
    if not present.weights.has_exactly(*hashes):
        raise ConfigurationError(
            "model: the starting model differs from the base of this run's adapters, which is "
            f"stored as {BASE}; give the model that the run began with (model.path)"
        )
    return present


def _stored_base(store: ObjectStore) -> Manifest | None:
    try:
        return read_manifest(store, BASE)
    except ObjectMissing:
        return None


def publish_adapter(
    store: ObjectStore,
    version: Version,
    tensors: AdapterTensors,
    base: Manifest,
    parent: Manifest | None,
    created_s: float,
    leads: bool = True,
) -> Manifest:
    """Writes the adapter; idempotent. A rank that does not lead writes nothing."""
    files: list[FileEntry] = []
    data, entries = pack_tensors(tensors, ADAPTER_TENSORS)
    for name, content in ((ADAPTER_TENSORS, data), (ADAPTER_CONFIG, tensors.config)):
        key = f"weights/{version}/{name}"
        digest = create_idempotent(store, key, content) if leads else content_hash(content)
        files.append(FileEntry(name, len(content), digest))
    manifest = Manifest(
        base.run,
        version,
        None if parent is None else parent.version,
        base.version,
        "adapter",
        created_s,
        TensorFiles(tuple(files), entries, {}),
        base.model_files,
        adapter=AdapterEntry(base.hash, tensors.scaling),
    )
    return complete_version(store, manifest) if leads else manifest


def fetch_base(store: ObjectStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    assert manifest.adapter, "only an adapter has a base"
    return fetch_tensors(store, manifest.anchor, manifest.adapter.base_hash)[1]


class AdapterForm(VersionForm):
    is_partial = True

    def publisher(self, publication: Publication) -> "AdapterPublisher":
        return AdapterPublisher(publication)

    def opening(
        self,
        store: ObjectStore,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
    ) -> OpeningTensors:
        assert manifest.adapter, "only an adapter has a base"
        base = MappedWeights()
        base.update(store, manifest.anchor, manifest.adapter.base_hash)
        return OpeningTensors(manifest.anchor, base.tensors)

    def model_tensors(
        self, store: ObjectStore, manifest: Manifest, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return merge_adapter(fetch_base(store, manifest), tensors, self.scaling(manifest))

    def scaling(self, manifest: Manifest) -> float:
        assert manifest.adapter, "only an adapter has a scaling"
        return manifest.adapter.scaling


class AdapterPublisher(FormPublisher):
    """Stores or compares the base before the first adapter of a term."""

    def __init__(self, publication: Publication) -> None:
        self._p = publication
        self._base: Manifest | None = None  # once it is known to be stored

    def publish(
        self, version: Version, tensors: Tensors, parent: Manifest | None, is_fork: bool = False
    ) -> Manifest:
        assert isinstance(tensors, AdapterTensors), "a run publishes one form"
        p = self._p
        if self._base is None:
            files, shard_bytes = p.model_files, p.settings.shard_bytes
            base, now_s = tensors.base(), p.clock()
            self._base = publish_base(p.store, p.run, base, files, shard_bytes, now_s, p.leads)
        return publish_adapter(p.store, version, tensors, self._base, parent, p.clock(), p.leads)
