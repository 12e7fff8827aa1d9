"""Checks of weights, made before any of them is written: a failed update must not leave a mixture
of two versions.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Container, Mapping

import numpy as np
import torch

from rollstream.storage.weights.resident import TensorPatch
from rollstream.errors import EngineRefused


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    finite: Container[str] | None = None,
) -> None:
    """Raise `EngineRefused`, which names the first tensor that is missing, has a wrong shape or, of
    those in `finite` (None: all), has values that are not finite.
    """
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise EngineRefused(f"weights: tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise EngineRefused(
                f"weights: tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}"
            )
        if finite is None or name in finite:
            _check_finite(name, tensor)


def check_patch(name: str, patch: TensorPatch, shape: tuple[int, ...]) -> None:
    """Raise `EngineRefused` if a patch has a wrong shape, an index beyond the tensor, or values
    that are not finite.
    """
    if tuple(patch.shape) != shape:
        raise EngineRefused(
            f"weights: the patch of {name!r} is for shape {tuple(patch.shape)}, "
            f"the model needs {shape}"
        )
    indices = np.asarray(patch.indices)
    if len(indices) != len(patch.values):
        raise EngineRefused(
            f"weights: the patch of {name!r} has {len(indices)} indices "
            f"and {len(patch.values)} values"
        )
    elements = int(np.prod(shape))
    if len(indices) and not (indices.min() >= 0 and indices.max() < elements):
        raise EngineRefused(
            f"weights: the patch of {name!r} reaches beyond its {elements} elements"
        )
    _check_finite(name, patch.values)


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise EngineRefused(f"weights: tensor {name!r} holds values that are not finite")
