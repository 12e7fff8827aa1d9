"""Chooses the decoder for a configuration, loads its weights and, where it uses transformers'
forward, tests it. Models that the engine cannot serve are refused by their configuration, before
any memory is allocated.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rollstream.errors import EngineRefused
from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.hf_decoder import TransformersDecoder
from rollstream.producers.engines.torch.llama import FusedDecoder
from rollstream.producers.engines.torch.llama_weights import FusedShape, fused_shape

# Sliding attention is full attention where its window holds the context.
_SERVED_LAYERS = {"full_attention", "sliding_attention"}


def refuse_unsupported(config: PreTrainedConfig, context_max: int) -> None:
    """Raise `EngineRefused`, which names the property of the configuration that is not served."""
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise EngineRefused(
            f"{name}: encoder-decoder models are not served, only decoder-only ones"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineRefused(f"{name}: transformers has no causal language model for it")
    rope = getattr(config, "rope_parameters", None) or {}  # pyright: ignore[reportUnknownVariableType]
    if rope.get("rope_type") in ("dynamic", "longrope"):  # pyright: ignore[reportUnknownMemberType]
        # Its frequencies follow the longest sequence seen, so a token would depend on its
        # neighbours (invariant 10).
        raise EngineRefused(f"{name}: rope type {rope['rope_type']!r} depends on the batch")
    if unserved := set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS:
        raise EngineRefused(f"{name}: layers of type {', '.join(sorted(unserved))} are not served")
    window = _window(config)
    if window is not None and window < context_max:
        raise EngineRefused(
            f"{name}: sliding window of {window} tokens; only full attention is served, "
            f"so set context_max (now {context_max}) to at most {window}"
        )


def _window(config: PreTrainedConfig) -> int | None:
    """The smallest attention window of a layer in tokens, None for full attention."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    local = "local" in (getattr(config, "attention_layers", None) or ())
    window = getattr(config, "window_size" if local else "sliding_window", None)
    return window if isinstance(window, int) else None


def open_decoder(
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    context_max: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """The fused decode path where it serves the configuration, else transformers' forward. Raises
    `EngineRefused` with the reason where neither does.
    """
    refuse_unsupported(config, context_max)
    shape = fused_shape(config)
    if isinstance(shape, FusedShape):
        decoder = FusedDecoder(shape, config, context_max, dtype, device)
        decoder.served.load(tensors)
        return decoder
    generic = TransformersDecoder(config, context_max, dtype, device)
    generic.served.load(tensors)
    generic.check_forward()
    return generic
