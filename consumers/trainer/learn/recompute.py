"""Gradient checkpointing: layers recompute their activations in the backward pass instead of
keeping them.

The activation memory of a pass is then that of one layer instead of all (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", arXiv 1604.06174), for a third more work. transformers' own
switch acts only on modules in training mode, which also turns dropout on. The trained policy must
be the sampled one, so the model stays in evaluation mode and the layers are wrapped here.
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

from rollstream.errors import ConfigurationError


def recompute_layers(model: nn.Module) -> None:
    """Make every decoder layer of `model` keep only its inputs for the backward pass; gradients
    stay the same.

    Only the layers' `forward` is replaced, so hooks on their call (those of `fully_shard`) run
    once, outside of the recomputation. To be called before such hooks are set.
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
