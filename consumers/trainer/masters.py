"""The fp32 masters: all parameters of a model in one flat buffer, each at a fixed place in it.

Optimiser, norm and accumulation then are a few operations over one tensor instead of some for each
parameter. The model's own parameters become views of the buffer, so its forward always sees the
newest masters.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from streams.errors import ConfigurationError

ALIGNMENT = (
    16  # floats, one cache line: products on the views are as fast as on tensors of their own
)


@dataclass(frozen=True, slots=True)
class Place:
    """`name` lies at `[start, start + size)` of the flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The view of this parameter."""
        return flat[self.start : self.start + self.size].view(self.shape)


class Masters:
    """`flat` holds the parameters of `model` from now on; gaps of the alignment stay 0."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.parameters: Sequence[Tensor] = list(named.values())
        self.places: list[Place] = []
        end = 0
        for name, parameter in named.items():
            self.places.append(Place(name, end, tuple(parameter.shape)))
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(end)
        for place, parameter in zip(self.places, self.parameters, strict=True):
            view = place.of(self.flat)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.requires_grad_()

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views by parameter name of a buffer with this layout."""
        return {place.name: place.of(flat) for place in self.places}

    def add(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Add one gradient per parameter, in the order of `parameters`, to a buffer with this
        layout.
        """
        for place, gradient in zip(self.places, gradients, strict=True):
            place.of(flat).add_(gradient)

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor], what: str) -> None:
        """Copy tensors of these names into a buffer; `ConfigurationError` when they are another
        model's.
        """
        for place in self.places:
            found = tensors.get(place.name)
            if found is None or tuple(found.shape) != place.shape:
                shape = "missing" if found is None else f"of shape {tuple(found.shape)}"
                raise ConfigurationError(
                    f"{what} of {place.name!r} is {shape}, the model has {place.shape}: "
                    "these tensors belong to another model configuration"
                )
            place.of(flat).copy_(found)
