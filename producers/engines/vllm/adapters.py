"""Under `keep_version` each version is an adapter, which requests name; under the in-flight modes
all follow one, whose factors are replaced between two decode steps. No request takes keys and
values of another version from vLLM's prefix cache (docs/explanation/lora.md).
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedConfig

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.queue import EngineWeights
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.torch.weights import check_tensors
from rollstream.producers.engines.vllm.local.core import LocalCore, open_core
from rollstream.producers.engines.vllm.local.environment import (
    AdapterSizes,
    has_gpu,
    require_vllm,
    shape_for,
)
from rollstream.producers.engines.vllm.local.parameter_map import ExpectedTensors, expected_tensors
from rollstream.producers.engines.vllm.local.protocol import EngineCore, ServedAdapter
from rollstream.producers.engines.vllm.local.weights import VllmWeights
from rollstream.storage.model_folder.hf_folder import ADAPTER_CONFIG, ADAPTER_TENSORS
from rollstream.storage.model_folder.lora import HIGH, LOW, PREFIX, layer_of
from rollstream.storage.weights.shards import pack_tensors
from rollstream.streams.values import Version

FOLLOWED = ("newest", 1)
"""Name and id of the adapter that requests without a version follow. Ids of versions are larger,
because the terms of trainers start at 1.
"""
TOGETHER = 8
"""Most adapters in one decode step; requests of further versions wait."""


def adapter_name(version: Version) -> tuple[str, int]:
    """Returns the LoRA request's name, the version as text, and its id, with the term in the upper
    bits and the number in the lower 32.
    """
    assert version.term >= 1, "term 0 is the base"
    return str(version), version.term << 32 | version.number


def adapter_sizes(needed: ExpectedTensors, vocabulary: int, rank: int, slots: int) -> AdapterSizes:
    """Returns the room for adapters of this rank, on all matrices but the embeddings and the
    head.
    """
    matrices = {
        name.split(".")[-2]
        for name, shape in needed.shapes.items()
        if len(shape) == 2 and shape[0] != vocabulary
    }
    # One per running or waiting trajectory; the newest version, the last loaded one, and two spare.
    loaded_max = 2 * slots + 4
    return AdapterSizes(rank, tuple(sorted(matrices)), min(TOGETHER, loaded_max), loaded_max)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """PEFT's two files: `tensors` (safetensors) and `config` (JSON). vLLM multiplies the factor B
    by `scaling`.
    """

    tensors: bytes
    config: str
    scaling: float


@dataclass(slots=True)
class VllmAdapters:
    core: LocalCore
    needed: ExpectedTensors
    # The largest rank of an adapter.
    rank: int
    loaded: dict[Version, ServedAdapter] = field(default_factory=dict[Version, ServedAdapter])
    followed: Version | None = None
    """The version of requests that name none; None while every request must name one."""
    _loads: int = 0
    # Version and scaling of the adapter that was loaded last.
    _latest: Version | None = None
    _scaling: float = 1.0

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Returns the checked update with its files (`PreparedAdapter`). Raises `EngineRefused`,
        which names the wrong tensor.
        """
        assert update.scaling is not None, "whole weights are no adapter"
        rank = self._check(update.tensors)
        alpha = update.scaling * rank
        config = {
            "bias": "none",
            "lora_alpha": alpha,
            "peft_type": "LORA",
            "r": rank,
            "target_modules": sorted({layer_of(name).split(".")[-1] for name in update.tensors}),
        }
        data, _ = pack_tensors(update.tensors, ADAPTER_TENSORS)
        return replace(update, prepared=PreparedAdapter(data, json.dumps(config), alpha / rank))

    def load(self, update: WeightUpdate) -> None:
        """Serve this version to requests that name none. No step may run meanwhile."""
        before = self.loaded.get(update.version)
        if before is not None:
            # Served already: loaded again under the same name.
            self._load(update, before.name, before.id)
        else:
            self._load(update, *FOLLOWED)
            if self.followed is not None:
                del self.loaded[self.followed]
            self.followed = update.version
        self.core.stamp(str(update.version))

    def load_beside(self, update: WeightUpdate) -> None:
        before = self.loaded.get(update.version)
        name = adapter_name(update.version) if before is None else (before.name, before.id)
        # For the requests that name it.
        self._load(update, *name)

    def of(self, version: Version | None) -> ServedAdapter | None:
        served_version = version or self.followed
        return None if served_version is None else self.loaded[served_version]

    def keep(self, versions: Collection[Version | None]) -> None:
        """Unload all adapters but `versions`, the followed one, the newest and the last loaded
        one.
        """
        used = {*versions, self.followed, self._latest, max(self.loaded, default=None)}
        for version in self.loaded.keys() - used:
            self.core.unload_adapter(self.loaded.pop(version).id)

    def compare(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        """Compares as `Engine.read_back` the last loaded version; a factor differs if it differs at
        any worker.
        """
        assert self._latest is not None, "no adapter was loaded"
        factors = [(name, tensors[name]) for name in sorted(set(names) & tensors.keys())]
        adapter = self.loaded[self._latest].id, self._scaling
        # Each worker compares its own part, B multiplied by the scaling, as vLLM holds it.
        differing = self.core.call_with_tensors("differing_factors", *adapter, tensors=factors)
        return WeightComparison(len(factors), tuple(sorted(set[str]().union(*differing))))

    def _load(self, update: WeightUpdate, name: str, number: int) -> None:
        if not isinstance(update.prepared, PreparedAdapter):
            update = self.prepare(update)
        prepared = update.prepared
        assert isinstance(prepared, PreparedAdapter), "prepare sets it"
        # Every load has a path of its own: vLLM keys the blocks of its prefix cache by the
        # adapter's name and path, so a request finds no keys and values of another version or of an
        # earlier load.
        self._loads += 1
        # vLLM keeps as many adapters as an engine can have in use (`AdapterSizes.kept`), so it
        # reads none a second time.
        with TemporaryDirectory(prefix="rollstream-adapter-") as folder:
            (Path(folder) / ADAPTER_TENSORS).write_bytes(prepared.tensors)
            (Path(folder) / ADAPTER_CONFIG).write_text(prepared.config, encoding="utf-8")
            adapter = ServedAdapter(name, number, folder, self._loads)
            try:
                self.core.load_adapter(adapter)
            except Exception as error:
                raise EngineRefused(
                    f"weights: vLLM did not load the adapter {update.version}: {error}"
                ) from error
        self.loaded[update.version] = adapter
        self._latest, self._scaling = update.version, prepared.scaling

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> int:
        shapes: dict[str, tuple[int, ...]] = {}
        ranks = [1]
        for name in tensors:
            layer = layer_of(name)
            weight = self.needed.shapes.get(f"{layer}.weight")
            if weight is None or len(weight) != 2 or not name.endswith((LOW, HIGH)):
                raise EngineRefused(f"weights: tensor {name!r} is of no layer that is served")
            low = tensors.get(f"{PREFIX}{layer}{LOW}")
            rank = 1 if low is None else low.shape[0]
            ranks.append(rank)
            shapes[f"{PREFIX}{layer}{LOW}"] = (rank, weight[1])
            shapes[f"{PREFIX}{layer}{HIGH}"] = (weight[0], rank)
        check_tensors(shapes, tensors)
        if max(ranks) > self.rank:
            raise EngineRefused(
                f"weights: the adapter's rank {max(ranks)} is above the {self.rank} that the "
                "engine was opened for (model.lora.rank)"
            )
        return max(ranks)


def open_core_and_weights(
    config: PreTrainedConfig,
    options: EngineOptions,
    settings: VllmSettings,
    drafts: int = 0,
) -> tuple[EngineCore, EngineWeights, VllmAdapters | None]:
    """Opens the core (vLLM, on this machine or at a URL), which has dummy weights until the first
    load. Raises `ConfigurationError` or `EngineRefused`, which names the missing part.
    """
    rank = options.adapter_rank
    if settings.url is not None:
        from rollstream.producers.engines.vllm.remote.factory import open_remote  # only for a URL

        if rank:
            raise EngineRefused("a vLLM server by URL serves no adapters (model.lora)")
        return *open_remote(config, options.slots, options.context_max, settings), None
    require_vllm()
    device = options.device or ("cuda" if has_gpu() else "cpu")
    needed = expected_tensors(config)
    sizes = options.slots, options.context_max
    shape = shape_for(config, *sizes, device, settings, drafts)
    if rank:
        room = adapter_sizes(needed, int(config.vocab_size), rank, options.slots)
        shape = replace(shape, adapters=room)
    core = open_core(config, shape)
    adapters = VllmAdapters(core, needed, rank) if rank else None
    return core, VllmWeights(core, needed, in_place=device != "cpu"), adapters
