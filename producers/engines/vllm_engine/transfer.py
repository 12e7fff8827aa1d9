"""The way of a version's tensors into vLLM's model, as one of its weight-transfer engines.

The rollout has the verified tensors of a version and says what changed since the one served. Whole
tensors go through vLLM's layerwise reload, which keeps the served memory until a layer is complete;
patches are written in place at their checkpoint coordinates. A failure in between leaves parts of
both versions, so nothing is served until a later update loaded everything.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from dataclasses import dataclass, field
from typing import Any

import torch

from producers.engines.vllm_engine.messages import patches_of, staged_patches
from producers.engines.vllm_engine.release import (
    CheckpointWeightPatch,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    load_checkpoint_weight_patches,
)
from producers.engines.vllm_engine.remote.uploads import UPLOADS
from producers.engines.vllm_engine.staging import Entry, staged_tensors
from storage.versions.held import Patch
from streams.errors import EngineRefused


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to connect to: tensors come with the chunks."""


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """Some tensors of a version, or patches of some, never both in one update; from another process
    they are `entries` of the staged file at `path`, from another machine the checked `upload`;
    `patched` describes the tensors of patches.
    """

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    path: str = ""
    entries: list[Entry] = field(default_factory=list)
    upload: str = ""
    patched: list[tuple[list[int], str]] | None = None

    def received(self) -> tuple[list[tuple[str, torch.Tensor]], list[Patch]]:
        if self.upload:
            parts = UPLOADS.pop(self.upload)
            return (parts, []) if self.patched is None else ([], patches_of(parts, self.patched))
        if not self.path:
            return self.tensors, self.patches
        if self.patched is None:
            return staged_tensors(self.path, self.entries), []
        return [], staged_patches(self.path, self.entries, self.patched)


class VersionTransfer(WeightTransferEngine[Nothing, Chunk]):
    """Start, chunks, finish; a failed chunk ends the update."""

    init_info_cls = Nothing
    update_info_cls = Chunk
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reloading = False
        self._wanted: set[str] = set()
        self._loaded: set[str] = set()
        self._tied = _tied_layers(self.model)

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        self._wanted = {name for name, _ in self.model.named_parameters()}  # tied ones once
        self._loaded = set()

    def receive_weights(self, update_info: Chunk) -> None:
        tensors, patches = update_info.received()
        if patches:
            load_checkpoint_weight_patches(
                self.model,
                [
                    CheckpointWeightPatch(p.name, p.shape, p.dtype, p.values, p.indices)
                    for p in patches
                ],
                validate_unique_indices=False,
            )
            return
        try:
            if not self._reloading:
                self._reloading = True
                initialize_layerwise_reload(self.model)
            self._loaded |= set(self.model.load_weights(tensors))
        except BaseException:
            self.give_up()
            raise

    def finish_weight_update(self) -> None:
        """`EngineRefused` names a parameter that got nothing."""
        if not self._reloading:
            return
        missing = sorted(self._wanted - self._loaded)
        self._close()
        if missing:
            raise EngineRefused(f"weights: nothing was loaded into vLLM's {missing[0]!r}")

    def shutdown(self) -> None:
        pass

    def give_up(self) -> None:
        """End an update that is not whole; what was received of layers that are not complete must
        not be loaded any more.
        """
        if not self._reloading:
            return
        for layer in self.model.modules():
            received = get_layerwise_info(layer)
            received.loaded_weights, received.load_numel = [], 0
        self._close()

    def _close(self) -> None:
        """Layers that got nothing keep what they had; of tied ones that is the memory of the other,
        which they may have packed.
        """
        self._reloading = False
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """Layers whose weight is also another, earlier layer's."""
    seen: set[int] = set()
    tied: list[Any] = []
    for layer in model.modules():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is None or not weight.numel():
            continue
        if id(weight) in seen and hasattr(layer, "quant_method"):
            tied.append(layer)
        seen.add(id(weight))
    return tied
