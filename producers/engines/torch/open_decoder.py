"""Chooses the decoder for a configuration, loads its weights and, where it uses transformers'
forward, tests it.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.llama import FusedDecoder
from rollstream.producers.engines.torch.fused_shape import FusedShape, fused_shape
from rollstream.producers.engines.torch.hf_decoder import TransformersDecoder
from rollstream.producers.engines.torch.decoder_factory import refuse_unsupported


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
    generic.try_out()
    return generic
