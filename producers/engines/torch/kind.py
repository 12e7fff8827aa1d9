"""The embedded engine, before it is opened (`TorchKind`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.kind import (
    ComputeDevice,
    EngineKind,
    EngineTables,
    ServedModel,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rollstream.producers.engines.base import Engine
    from rollstream.producers.engines.options import EngineOptions
    from rollstream.producers.engines.settings import RolloutFields
    from rollstream.streams.values import Version

_DEVICES: dict[str, frozenset[ComputeDevice]] = {
    "cpu": frozenset({"cpu"}),
    "cuda": frozenset({"cuda"}),
    "auto": frozenset({"cpu", "cuda"}),
}


class TorchKind(EngineKind):
    name = "torch"
    module = "rollstream.producers.engines.torch.engine"

    def can_draft(self, r: "RolloutFields") -> bool:
        return True

    def computes_on(self, r: "RolloutFields") -> frozenset[ComputeDevice]:
        return _DEVICES[r.device]

    def dtype(self, r: "RolloutFields") -> str:
        return r.dtype

    def device(self, r: "RolloutFields") -> str | None:
        import torch

        is_there = torch.cuda.is_available()
        if r.device == "cuda" and not is_there:
            raise ConfigurationError(
                "rollouts.device: PyTorch sees no CUDA device here; set it to 'cpu' or 'auto', or "
                "install a CUDA build of PyTorch"
            )
        return "cuda" if is_there and r.device != "cpu" else "cpu"

    def timed_settings(self, r: "RolloutFields") -> Mapping[str, object]:
        return r.model_dump(include={"dtype"}, exclude_defaults=True)

    def adapter_problem(self, r: "RolloutFields") -> None:
        return None

    def check_model(self, model: "PreTrainedModel", context_max: int, is_adapted: bool) -> None:
        from rollstream.producers.engines.torch.engine import refuse_model

        refuse_model(model, context_max, is_adapted)

    def context_bound(self, fields: Mapping[str, object]) -> int | None:
        """Returns the attention window of the model's layers, as `refuse_unsupported` finds it."""
        # From the plain fields: the import of transformers takes seconds.
        inner = fields.get("text_config")
        text = cast(Mapping[str, object], inner) if isinstance(inner, Mapping) else fields
        # Of Qwen's classes alone a window without this field is unused.
        is_qwen = str(text.get("model_type", "")).startswith("qwen")
        if text.get("use_sliding_window", not is_qwen) is False:
            return None
        layers = text.get("attention_layers")
        local = isinstance(layers, list) and "local" in layers
        window = text.get("window_size" if local else "sliding_window")
        return window if isinstance(window, int) and window > 0 else None

    def open(
        self,
        c: EngineTables,
        model: ServedModel,
        tensors: "Mapping[str, torch.Tensor]",
        version: "Version",
        options: "EngineOptions",
    ) -> "Engine":
        import torch

        from rollstream.producers.engines.torch.engine import TorchEngine

        dtype: torch.dtype = getattr(torch, options.dtype)
        return TorchEngine(model.config(), tensors, version, options, dtype=dtype)
