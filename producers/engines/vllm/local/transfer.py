"""A weight-transfer engine of vLLM: whole tensors by its layerwise reload, which keeps the served
memory until a layer is complete; patches in place. A failure between chunks leaves a mixture of
both versions, so no token is generated until a later update has loaded all weights.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.vllm.local import release
from rollstream.producers.engines.vllm.local.parameter_map import served_part
from rollstream.producers.engines.vllm.local.staging import (
    StagedTensor,
    patches_from_parts,
    read_staged_patches,
    staged_tensors,
)
from rollstream.producers.engines.vllm.local.uploads import UPLOADS
from rollstream.storage.weights.resident import TensorPatch


@dataclass
class NoInitInfo(release.WeightTransferInitInfo):
    """Is empty: no connection is needed, because tensors come with the chunks."""


@dataclass
class WeightChunk(release.WeightTransferUpdateInfo):
    """Tensors or patches, as the `entries` of the staged file at `path`, or from another machine as
    the checked `upload`. `patched` has the shapes and types of the patched tensors.
    """

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    patches: list[TensorPatch] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    path: str = ""
    entries: list[StagedTensor] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    upload: str = ""
    patched: list[tuple[list[int], str]] | None = None

    def received(self) -> tuple[list[tuple[str, torch.Tensor]], list[TensorPatch]]:
        if self.upload:
            parts = UPLOADS.pop(self.upload)
            return (
                (parts, [])
                if self.patched is None
                else ([], patches_from_parts(parts, self.patched))
            )
        if not self.path:
            return self.tensors, self.patches
        if self.patched is None:
            return staged_tensors(self.path, self.entries), []
        return [], read_staged_patches(self.path, self.entries, self.patched)


class VersionTransfer(release.WeightTransferEngine[NoInitInfo, WeightChunk]):
    """An update is a start, chunks, and a finish; a failed chunk ends its update."""

    init_info_cls = NoInitInfo
    update_info_cls = WeightChunk
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reloading = False
        self._wanted: set[str] = set()
        self._loaded: set[str] = set()
        self._tied = _tied_layers(self.model)

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # Tied parameters are listed once; a layer that vLLM wraps for adapters loads under its own
        # name, without `base_layer`.
        names = (name for name, _ in self.model.named_parameters())
        self._wanted = {name.replace(".base_layer.", ".") for name in names}
        self._loaded = set()

    def receive_weights(self, update_info: WeightChunk) -> None:
        tensors, patches = update_info.received()
        if patches:
            release.load_checkpoint_weight_patches(
                self.model,
                [
                    release.CheckpointWeightPatch(p.name, p.shape, p.dtype, p.values, p.indices)
                    for p in patches
                ],
                validate_unique_indices=False,
            )
            return
        try:
            if not self._reloading:
                self._reloading = True
                release.initialize_layerwise_reload(self.model)
            model: Any = self.model
            self._loaded |= set(model.load_weights(tensors))
        except BaseException:
            self.give_up()
            raise

    def finish_weight_update(self) -> None:
        """End a complete update. Raises `EngineRefused`, which names a parameter that was not
        loaded.
        """
        if not self._reloading:
            return
        missing = sorted(self._wanted - self._loaded)
        self._close()
        if missing:
            raise EngineRefused(f"weights: nothing was loaded into vLLM's {missing[0]!r}")

    def shutdown(self) -> None:
        pass

    def give_up(self) -> None:
        if not self._reloading:
            return
        for layer in self.model.modules():
            # vLLM would load the tensors of incomplete layers later.
            received = release.get_layerwise_info(layer)
            received.loaded_weights, received.load_numel = [], 0
        self._close()

    def _close(self) -> None:
        self._reloading = False
        # Layers without a received tensor keep their weights.
        release.finalize_layerwise_reload(self.model, self.model_config)
        # A tied layer may have packed a copy of the other layer's memory.
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    seen: set[int] = set()
    tied: list[Any] = []
    for layer in model.modules():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is None or not weight.numel():
            continue
        # An earlier layer has the same weight.
        if id(weight) in seen and hasattr(layer, "quant_method"):
            tied.append(layer)
        seen.add(id(weight))
    return tied


def is_elsewhere(model: Any, name: str) -> bool:
    layers = model.named_modules()
    absent = {path for path, layer in layers if isinstance(layer, release.PPMissingLayer)}
    return not absent.isdisjoint(accumulate(name.split("."), "{}.{}".format))


@torch.no_grad()
def loaded_part(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this worker would serve of a whole tensor. No step may run beside the call."""
    part = served_part(model, name)
    parameters, served = part.layer._parameters, part.layer._parameters[part.kind]
    # The parameter's shape before vLLM packed it; a bias is not recorded there, and is not packed.
    recorded = release.get_layerwise_info(part.layer).restore_metadata[0].get(part.kind)
    with torch.device("cpu"):
        scratch = release.materialize_meta_tensor(
            release.to_meta_tensor(served) if recorded is None else recorded
        )
    loader: Any = getattr(scratch, "weight_loader", None)
    # An earlier reload wrapped the loader.
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    if loader is not None:
        scratch.weight_loader = loader
    # vLLM's own loader cuts the tensor into this scratch parameter, in place of the served one.
    parameters[part.kind] = release.restore_layer_refs(scratch, part.layer)
    try:
        loaded: set[str] = model.load_weights([(name, tensor)])
    finally:
        parameters[part.kind] = served
    if not loaded:
        raise EngineRefused(
            f"weights: vLLM loads {name!r} into no parameter, so it is not compared"
        )
    return scratch[part.rows]
