"""The fp32 masters: all parameters of a model in one flat buffer, each at a fixed offset.

Optimiser, norm and accumulation are then a few operations over one tensor instead of several per
parameter. The model's own parameters become views of the buffer, or, where it computes in another
type, of a second buffer that holds the masters rounded to that type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from rollstream.errors import ConfigurationError

CPU = torch.device("cpu")
ALIGNMENT = 16  # floats, one cache line: views are then as fast as tensors of their own


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Parameter `name` occupies `[start, start + size)` of the flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's view of a flat buffer."""
        return flat[self.start : self.start + self.size].view(self.shape)


class Masters:
    """Holds the parameters of `model` in `flat` (on `device`) from now on; alignment gaps stay 0.
    The model computes in `compute`; modules that its class keeps in float32, and buffers (rotary
    frequencies), keep their type.
    """

    def __init__(
        self, model: nn.Module, compute: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> None:
        named = dict(model.named_parameters())
        self.parameters: Sequence[Tensor] = list(named.values())
        self.slices: list[ParameterSlice] = []
        end = 0
        for name, parameter in named.items():
            self.slices.append(ParameterSlice(name, end, tuple(parameter.shape)))
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(end, device=device)
        rounded: Tensor | None = None
        if compute != torch.float32:
            rounded = torch.zeros(end, dtype=compute, device=device)
        exact = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for one, parameter in zip(self.slices, self.parameters, strict=True):
            view = one.view(self.flat)
            view.copy_(parameter.detach())
            is_exact = not exact.isdisjoint(one.name.split("."))
            parameter.data = view if is_exact or rounded is None else one.view(rounded)
            parameter.requires_grad_()
        self._rounded = rounded
        model.to(device)  # the buffers
        self.round()

    def round(self) -> None:
        """Round the masters into the model's parameters; to be called after each change of
        `flat`.
        """
        if self._rounded is not None:
            self._rounded.copy_(self.flat)

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """The state of `model` (the one of the constructor) under checkpoint names, with the
        masters themselves as its parameters; tied ones share memory.
        """
        views = {
            id(parameter): one.view(self.flat)
            for one, parameter in zip(self.slices, self.parameters, strict=True)
        }
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return {name: views.get(id(tensor), tensor) for name, tensor in state.items()}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a buffer with this layout, by parameter name."""
        return {one.name: one.view(flat) for one in self.slices}

    def add(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Add one gradient per parameter, in the order of `parameters`, to a buffer with this
        layout.
        """
        for one, gradient in zip(self.slices, gradients, strict=True):
            one.view(flat).add_(gradient)

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the checkpoint's tensors named `prefix` + parameter name into a buffer;
        `ConfigurationError` if they are of another model.
        """
        for one in self.slices:
            one.view(flat).copy_(checkpoint_tensor(tensors, prefix + one.name, one.shape))


def checkpoint_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """The checkpoint's tensor `name`; `ConfigurationError` if it is missing or of another shape."""
    found = tensors.get(name)
    if found is not None and tuple(found.shape) == shape:
        return found
    what = "missing" if found is None else f"of shape {tuple(found.shape)}"
    raise ConfigurationError(
        f"checkpoint: {name!r} is {what}, the model has {shape}: "
        "these tensors belong to another model configuration"
    )
