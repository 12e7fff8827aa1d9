"""The places of a checkpoint tensor's elements in an engine's served weights, and the factors that
they are multiplied by.

The same description is used for loading, patching and reading back: a place is a strided view of
the served memory whose elements are in the checkpoint tensor's order, so that copies, index
arithmetic and comparisons all follow from shape and strides. Every element goes through the same
operations in fp32, whether its whole tensor is loaded or the element is patched, so both give the
same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WeightView:
    """`view` holds the checkpoint tensor's elements in its order; its shape may differ.

    Each element is multiplied by `scale`, then by the factor of its column: the weight of `norm`
    times the root of the number of columns, which the unweighted norm before the matrix leaves out.
    """

    view: Tensor
    scale: float | None = None
    norm: str | None = None

    def served(self, values: Tensor, factor: Tensor | None) -> Tensor:
        """The values to serve for checkpoint `values`; `factor` is that of their columns."""
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
        """The factor of each column, from the checkpoint's norm; None without a norm."""
        if self.norm is None:
            return None
        norm = tensors[self.norm]
        return norm.to(self.view.device).float() * norm.numel() ** 0.5

    def fill(self, tensor: Tensor, factor: Tensor | None) -> None:
        """Write all elements of a checkpoint tensor."""
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
        """The whole storage of `view` as one dimension."""
        storage = self.view.untyped_storage()
        elements = storage.nbytes() // self.view.element_size()
        return torch.empty(0, dtype=self.view.dtype, device=self.view.device).set_(
            storage, 0, (elements,), (1,)
        )

    def rowwise(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The view and a tensor of checkpoint order, both permuted to the order of the served
        memory, so that a copy runs along it; the tensor is made contiguous.
        """
        order = sorted(range(self.view.ndim), key=lambda i: -self.view.stride(i))
        return self.view.permute(order), tensor.view(self.view.shape).permute(order).contiguous()


def _merged(view: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the view's dimensions; neighbours that are contiguous are joined."""
    found: list[tuple[int, int]] = [(1, 0)]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        outer, step = found[-1]
        if outer == 1 or step == size * stride:
            found[-1] = (outer * size, stride)
        else:
            found.append((size, stride))
    return found
