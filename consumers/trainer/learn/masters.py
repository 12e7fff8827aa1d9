"""Holds the fp32 masters, all trained parameters of a model in one flat buffer, and updates them by
AdamW.

Optimiser, norm and accumulation are a few operations over one tensor instead of several per
parameter. The model's own parameters become views of the buffer, or, where it computes in another
type or on another device, of a second buffer that holds the masters rounded to that type. Gradients
are clipped by global norm; the learning rate is a function of the update's number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import ConfigurationError

CPU = torch.device("cpu")
ALIGNMENT = 16  # floats, one cache line: views are then as fast as tensors of their own
ROUNDED_NUMBERS = 1 << 24
"""Numbers that are rounded at a time: on the way to a device torch rounds them into a copy."""


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
        """Returns this parameter's view of a flat buffer."""
        return flat[self.start : self.start + self.size].view(self.shape)


class Masters:
    """Holds the trained parameters of `model` in `flat` from now on; alignment gaps stay 0. The
    model computes in `compute` on `device`; modules that its class keeps in float32, and buffers
    (rotary frequencies), keep their type. A frozen parameter (`requires_grad` False) has no master:
    it is held once, in `compute`.

    `flat` is on `device`, or, with `offload`, in host memory: the device then has no float32 copy,
    and every gradient moves to the host to be added there.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype = torch.float32,
        device: torch.device = CPU,
        offload: bool = False,
    ) -> None:
        own = dict(model.named_parameters())
        named = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        self.parameters: Sequence[Tensor] = list(named.values())
        self.slices: list[ParameterSlice] = []
        end = 0
        for name, parameter in named.items():
            self.slices.append(ParameterSlice(name, end, tuple(parameter.shape)))
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(end, device=CPU if offload else device)
        rounded: Tensor | None = None
        if compute != torch.float32 or offload:
            rounded = torch.zeros(end, dtype=compute, device=device)
        self._exact: list[tuple[ParameterSlice, Tensor]] = []
        exact = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for name in own.keys() - named.keys():
            if exact.isdisjoint(name.split(".")):
                own[name].data = own[name].data.to(compute)
        for place, parameter in zip(self.slices, self.parameters, strict=True):
            view = place.view(self.flat)
            view.copy_(parameter.detach())
            is_exact = not exact.isdisjoint(place.name.split("."))
            if is_exact and offload:
                view = torch.empty(place.shape, device=device)
                self._exact.append((place, view))
            parameter.data = view if is_exact or rounded is None else place.view(rounded)
        self._rounded = rounded
        model.to(device)  # the buffers
        self.round()

    def round(self) -> None:
        """Round the masters into the model's parameters; to be called after each change of
        `flat`.
        """
        if self._rounded is not None:
            for start in range(0, len(self.flat), ROUNDED_NUMBERS):
                part = slice(start, start + ROUNDED_NUMBERS)
                self._rounded[part].copy_(self.flat[part])
        for place, tensor in self._exact:
            tensor.copy_(place.view(self.flat))

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the state of `model` (the one of the constructor) under checkpoint names, with
        the masters themselves as its parameters; tied tensors share memory.
        """
        views = {
            id(parameter): place.view(self.flat)
            for place, parameter in zip(self.slices, self.parameters, strict=True)
        }
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return {name: views.get(id(tensor), tensor) for name, tensor in state.items()}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of a buffer with this layout, by parameter name."""
        return {place.name: place.view(flat) for place in self.slices}

    def add(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Add one gradient per parameter, in the order of `parameters`, to a buffer with this
        layout.
        """
        for place, gradient in zip(self.slices, gradients, strict=True):
            place.view(flat).add_(gradient.to(flat.device))

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the checkpoint's tensors named `prefix` + parameter name into a buffer; raises
        `ConfigurationError` if they are of another model.
        """
        for place in self.slices:
            place.view(flat).copy_(checkpoint_tensor(tensors, prefix + place.name, place.shape))


def checkpoint_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the checkpoint's tensor `name`; raises `ConfigurationError` if it is missing or of
    another shape.
    """
    found = tensors.get(name)
    check_checkpoint_shape(name, None if found is None else tuple(found.shape), shape)
    assert found is not None
    return found


def check_checkpoint_shape(
    name: str, found: tuple[int, ...] | None, shape: tuple[int, ...]
) -> None:
    """Raise `ConfigurationError` if a checkpoint's tensor has another shape than the model's, or is
    missing (None).
    """
    if found == shape:
        return
    what = "missing" if found is None else f"of shape {found}"
    raise ConfigurationError(
        f"checkpoint: {name!r} is {what}, the model has {shape}: "
        "these tensors belong to another model configuration"
    )


BASE_HASH = "base.hash"
"""Name in a checkpoint of an adapter: the hash of its frozen base."""


def hash_tensor(digest: str) -> Tensor:
    """Returns a hash in hexadecimal digits as the tensor that checkpoints hold."""
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


def check_base_hash(found: Tensor | None, mine: Tensor | None) -> None:
    """Raise `ConfigurationError` unless a checkpoint's base is the model's own; None means that no
    adapter is trained.
    """
    if (found is None) == (mine is None) and (
        found is None or mine is None or torch.equal(found, mine)
    ):
        return
    raise ConfigurationError(
        "checkpoint: its adapter belongs to another base model, or one of the two has no "
        "adapter; give the model and model.lora that the run began with"
    )


NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def learning_rate(update: int, settings: TrainerSettings) -> float:
    """Returns the learning rate of update `update` (0 is the first): a linear warm-up times a
    linear decay from 1 to `lr_final` at the last update.
    """
    last = settings.steps * settings.updates_per_step - 1
    ramp = min(1.0, (update + 1) / max(1, settings.lr_ramp_steps))
    gone = min(1.0, update / last) if last > 0 else 0.0
    return settings.lr * ramp * (1 - (1 - settings.lr_final) * gone)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Holds the result of an update: gradient norm before clipping, learning rate, 0 or 1 updates
    skipped.
    """

    gradient_norm: float
    learning_rate: float
    skipped: int


class Optimiser:
    """Updates `flat` in place by AdamW (Loshchilov & Hutter, "Decoupled weight decay", arXiv
    1711.05101; decay on all tensors).

    Its whole state is `mean` and `square` (Adam's moments, laid out like `flat`), `updates` and
    `applied`.
    """

    def __init__(self, flat: Tensor, settings: TrainerSettings) -> None:
        self._settings = settings
        self._masters = torch.nn.Parameter(flat)
        self._adam = torch.optim.AdamW(
            [self._masters],
            lr=settings.lr,
            betas=settings.betas,
            eps=1e-8,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.mean, self.square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._applied = torch.zeros((), device=flat.device)
        self._adam.state[self._masters] = {
            "step": self._applied,
            "exp_avg": self.mean,
            "exp_avg_sq": self.square,
        }
        self.updates = 0

    @property
    def applied(self) -> int:
        """Updates that were not skipped: Adam's bias correction counts these."""
        return int(self._applied)

    def load(self, updates: int, applied: int) -> None:
        """Set the counters; the caller fills `mean` and `square`."""
        self.updates = updates
        self._applied.fill_(applied)

    def update(self, gradient: Tensor, weight: float) -> UpdateResult:
        """Apply one update by `gradient` / `weight`, clipped; `gradient` is overwritten.

        The update is skipped if no token was trained or the gradient is not finite: a NaN in the
        masters would end the run, while a lost batch costs little.
        """
        rate = learning_rate(self.updates, self._settings)
        self.updates += 1
        norm = float(torch.linalg.vector_norm(gradient)) / weight if weight else 0.0  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        if not weight or not math.isfinite(norm):
            return UpdateResult(norm, rate, 1)
        clip = min(1.0, self._settings.gradient_norm_max / (norm + NORM_EPS))
        self._masters.grad = gradient.mul_(clip / weight)
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()  # pyright: ignore[reportUnknownMemberType]
        return UpdateResult(norm, rate, 0)
