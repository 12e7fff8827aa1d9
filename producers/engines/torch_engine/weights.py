"""Checking weights before any of them is written: a failed update must not leave a mixture behind
unnoticed.
"""

from collections.abc import Mapping

import torch

from streams.errors import EngineRefused


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """`EngineRefused` names the first tensor that is missing, misshapen or not finite; others are
    not looked at.
    """
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise EngineRefused(f"weights: tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise EngineRefused(
                f"weights: tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise EngineRefused(f"weights: tensor {name!r} holds values that are not finite")
