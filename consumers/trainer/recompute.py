"""Layers whose activations are not kept for the backward pass but computed once more there.

Memory of a pass then grows with one layer instead of all (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174), for a third more work. transformers' own switch acts only
on modules in training mode, which would switch dropout on with it; the policy that is trained must
be the one that is sampled, so it stays in evaluation mode and the layers are wrapped here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from streams.errors import ConfigurationError


def recompute_layers(model: nn.Module) -> None:
    """From now on every decoder layer of `model` keeps its inputs alone; gradients are the same.

    Only `forward` of the layers is replaced, so hooks on their call (those of `fully_shard`) run
    once, outside; call this before such hooks are set.
    """
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that "
            "transformers can recompute; set it to false"
        )
    for layer in layers:
        layer.forward = MethodType(_recomputed, layer)


def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return own(*args, **kwargs)
    return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
