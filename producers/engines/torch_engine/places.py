"""Where the elements of a checkpoint tensor lie in what an engine serves, and what they are
multiplied by on the way there.

One description serves loading, patching and reading back: a place is a strided view of the served
memory whose elements are in the checkpoint tensor's order, so that copying, index arithmetic and
comparison all follow from shape and strides. Every element goes through the same operations in
fp32, whether its whole tensor is loaded or it is patched alone, so both give the same bits.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """`view` has the checkpoint tensor's elements in its order, whatever its own shape.

    Each is multiplied by `scale`, then, by its column, by the weight of `norm` times the root of
    the number of columns (what an unweighted norm in front leaves out).
    """

    view: Tensor
    scale: float | None = None
    norm: str | None = None

    def served(self, values: Tensor, factor: Tensor | None) -> Tensor:
        """What is served for checkpoint `values`; `factor` is that of their columns."""
        values = values.to(self.view.device)
        if self.scale is None and factor is None:
            return values.to(self.view.dtype)
        exact = values.float()
        if self.scale is not None:
            exact = exact * self.scale
        if factor is not None:
            exact = exact * factor
        return exact.to(self.view.dtype)

    def factor(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """One factor per column, from the checkpoint's norm; None without a norm."""
        if self.norm is None:
            return None
        norm = tensors[self.norm]
        return norm.to(self.view.device).float() * norm.numel() ** 0.5

    def fill(self, tensor: Tensor, factor: Tensor | None) -> None:
        """Serve all of a checkpoint tensor."""
        self.view.copy_(self.served(tensor, factor).view(self.view.shape))

    def positions(self, indices: Indices) -> Indices:
        """Flat checkpoint indices as positions in `flat`."""
        rest, found = indices, np.full(len(indices), self.view.storage_offset(), np.int64)
        dimensions = _merged(self.view)
        for size, stride in dimensions[:0:-1]:
            rest, at = np.divmod(rest, size)
            found += at * stride
        return found + rest * dimensions[0][1]

    @property
    def flat(self) -> Tensor:
        """The memory behind `view`, one dimension from its begin on."""
        storage = self.view.untyped_storage()
        elements = storage.nbytes() // self.view.element_size()
        return torch.empty(0, dtype=self.view.dtype, device=self.view.device).set_(
            storage, 0, (elements,), (1,)
        )

    def rowwise(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The view and a tensor like it, both in the order of the served memory, so that copying
        one to the other follows it; the tensor is contiguous.
        """
        order = sorted(range(self.view.ndim), key=lambda i: -self.view.stride(i))
        return self.view.permute(order), tensor.view(self.view.shape).permute(order).contiguous()


def _merged(view: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the view's dimensions, neighbours that lie one in the other joined."""
    found: list[tuple[int, int]] = [(1, 0)]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        outer, step = found[-1]
        if outer == 1 or step == size * stride:
            found[-1] = (outer * size, stride)
        else:
            found.append((size, stride))
    return found
