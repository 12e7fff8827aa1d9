"""The masters, all trained parameters as float32 in one flat buffer, and their updates by AdamW or
Muon. In one buffer gradient norm, clipping and AdamW are a few operations instead of several for
each parameter.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn import low_bit
from rollstream.errors import ConfigurationError

CPU = torch.device("cpu")
ALIGNMENT = 16  # floats, one cache line: views are then as fast as tensors of their own
ROUNDED_NUMBERS = 1 << 24
"""At a time: rounding to another device first makes a temporary copy."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A parameter at `[start, start + size)` of the flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size].view(self.shape)


class Masters:
    """`flat` holds the trained parameters of `model`; its own become views of it, or of a rounded
    copy in the type `compute`. Gaps between `slices` (`ALIGNMENT`) stay 0.

    Modules that the model's class keeps in float32, and torch's buffers, keep their type. A frozen
    parameter has no master: it is held once, in `compute`. With `offload` `flat` is in host memory,
    where gradients are added too.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype = torch.float32,
        device: torch.device = CPU,
        offload: bool = False,
    ) -> None:
        parameters = dict(model.named_parameters())
        trained = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        self.parameters: Sequence[Tensor] = list(trained.values())
        self.slices: list[ParameterSlice] = []
        end = 0
        for name, parameter in trained.items():
            self.slices.append(ParameterSlice(name, end, tuple(parameter.shape)))
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(end, device=CPU if offload else device)
        rounded: Tensor | None = None
        if compute != torch.float32 or offload:
            rounded = torch.zeros(end, dtype=compute, device=device)
        self._exact: list[tuple[ParameterSlice, Tensor]] = []
        exact = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for name in parameters.keys() - trained.keys():
            if exact.isdisjoint(name.split(".")):
                parameters[name].data = parameters[name].data.to(compute)
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
        """Copies the masters, rounded, into the model's parameters: after each change of `flat`."""
        if self._rounded is not None:
            for start in range(0, len(self.flat), ROUNDED_NUMBERS):
                part = slice(start, start + ROUNDED_NUMBERS)
                self._rounded[part].copy_(self.flat[part])
        for place, tensor in self._exact:
            tensor.copy_(place.view(self.flat))

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors of `model` under their checkpoint names: trained ones are views of `flat`,
        not rounded; tied tensors share memory.
        """
        views = {
            id(parameter): place.view(self.flat)
            for place, parameter in zip(self.slices, self.parameters, strict=True)
        }
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return {name: views.get(id(tensor), tensor) for name, tensor in state.items()}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of the parameters in a buffer with the layout of `flat`."""
        return {place.name: place.view(flat) for place in self.slices}

    def add(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """One gradient for each of `parameters`; `flat` is a buffer of that layout."""
        for place, gradient in zip(self.slices, gradients, strict=True):
            place.view(flat).add_(gradient.to(flat.device))


def restore(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Copies the tensors named `prefix` + name. Raises `ConfigurationError` if one is missing or
    has another shape: the checkpoint is of another model.
    """
    for name, tensor in targets.items():
        tensor.copy_(checkpoint_tensor(tensors, prefix + name, tuple(tensor.shape)))


def checkpoint_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Raises as `restore`."""
    tensor = tensors.get(name)
    check_checkpoint_shape(name, None if tensor is None else tuple(tensor.shape), shape)
    assert tensor is not None
    return tensor


def check_checkpoint_shape(
    name: str, stored: tuple[int, ...] | None, shape: tuple[int, ...]
) -> None:
    """Raises `ConfigurationError` unless the stored shape (None: missing) is the model's."""
    if stored == shape:
        return
    what = "missing" if stored is None else f"of shape {stored}"
    raise ConfigurationError(
        f"checkpoint: {name!r} is {what}, the model has {shape}: "
        "these tensors belong to another model configuration"
    )


BASE_HASH = "base.hash"
"""Name, in a checkpoint of LoRA adapters, of the hash of their frozen base."""


def hash_tensor(digest: str) -> Tensor:
    """Returns a tensor of the bytes of these hexadecimal digits."""
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


def check_base_hash(stored: Tensor | None, mine: Tensor | None) -> None:
    """Raises `ConfigurationError` unless the checkpoint's adapters (hash `stored`) belong to this
    run's base (`mine`); None means without adapters.
    """
    if (stored is None) == (mine is None) and (
        stored is None or mine is None or torch.equal(stored, mine)
    ):
        return
    raise ConfigurationError(
        "checkpoint: its adapter belongs to another base model, or one of the two has no "
        "adapter; give the model and model.lora that the run began with"
    )


NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def learning_rate(update: int, settings: TrainerSettings) -> float:
    """`lr` times a linear warm-up over the first `lr_ramp_steps` updates, times a linear decay from
    1 to `lr_final` at the run's last; `update` counts from 0.
    """
    last = settings.steps * settings.updates_in_step - 1
    ramp = min(1.0, (update + 1) / max(1, settings.lr_ramp_steps))
    gone = min(1.0, update / last) if last > 0 else 0.0
    return settings.lr * ramp * (1 - (1 - settings.lr_final) * gone)


def guarded_rate(rate: float, ess: float, settings: TrainerSettings) -> float:
    """`ess_guard = "scale"` multiplies the rate by the share of effective samples, as in VCPO
    (arXiv 2602.17616): a gradient's variance grows as they become fewer.
    """
    return rate * min(1.0, ess) if settings.ess_guard == "scale" else rate


def is_guarded(ess: float, settings: TrainerSettings) -> bool:
    return settings.ess_guard == "skip" and ess < settings.ess_min


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Norm of the gradient before clipping, learning rate, and `skipped` (1 or 0)."""

    gradient_norm: float
    learning_rate: float
    skipped: int


MUON_MOMENTUM = 0.95
"""μ of Muon with Nesterov's momentum (Jordan et al., "Muon", 2024), torch's default too."""


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer += [] if head is None else [head]
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in excluded
    )


class Optimiser:
    """Updates the masters `flat` in place: the `matrices` by Muon (Jordan et al., 2024), all others
    by AdamW (Loshchilov & Hutter, arXiv 1711.05101), with gradients clipped by their global norm.
    Muon's updates are scaled to the size of AdamW's, so both have one learning rate (Liu et al.,
    arXiv 2502.16982, section 2.2); its momentum takes the place of the first moment.

    A checkpoint keeps, besides `flat`, the `moments` by name (`mean.` or `square.` and the
    parameter's), and the numbers of `updates` and of those not skipped (`applied`).
    """

    def __init__(
        self,
        flat: Tensor,
        settings: TrainerSettings,
        slices: Sequence[ParameterSlice],
        matrices: Collection[str] = (),
    ) -> None:
        self._settings = settings
        self.updates = self.applied = 0
        self._adam: Any = None
        self._muon = None
        self._parts: list[tuple[nn.Parameter, ParameterSlice | None]] = []
        self.moments: dict[str, Tensor] = {}
        if settings.optimiser == "adamw_8bit":
            parameters = {place.name: nn.Parameter(place.view(flat)) for place in slices}
            self._parts = [(parameters[place.name], place) for place in slices]
            self._adam = low_bit.eight_bit_adamw(parameters, settings)
            self.moments = low_bit.named_moments(self._adam, parameters)
        else:
            self._open_float(flat, slices, matrices)

    def _open_float(
        self, flat: Tensor, slices: Sequence[ParameterSlice], matrices: Collection[str]
    ) -> None:
        settings, mean, square = self._settings, torch.zeros_like(flat), torch.zeros_like(flat)
        for kind, moment in (("mean", mean), ("square", square)):
            self.moments |= {f"{kind}.{place.name}": place.view(moment) for place in slices}
        places: list[ParameterSlice | None] = [None]  # the whole of `flat`
        if matrices:
            places = [place for place in slices if place.name not in matrices]
        self._parts = [(nn.Parameter(_part(flat, place)), place) for place in places]
        if places:
            self._adam = torch.optim.AdamW(
                [parameter for parameter, _ in self._parts],
                lr=settings.lr,
                betas=settings.betas,
                eps=1e-8,
                weight_decay=settings.weight_decay,
                fused=True,
            )
            for parameter, place in self._parts:
                self._adam.state[parameter] = {
                    "step": torch.zeros((), device=flat.device),
                    "exp_avg": _part(mean, place),
                    "exp_avg_sq": _part(square, place),
                }
        muon_parts = [(nn.Parameter(p.view(flat)), p) for p in slices if p.name in matrices]
        if muon_parts:
            self._muon = torch.optim.Muon(
                [parameter for parameter, _ in muon_parts],
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                momentum=MUON_MOMENTUM,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            )
            for parameter, place in muon_parts:
                self._muon.state[parameter] = {"momentum_buffer": place.view(mean)}
        self._parts += muon_parts

    def load(self, updates: int, applied: int) -> None:
        """Loads from a checkpoint; the caller fills `moments`."""
        # Adam's bias correction counts the updates that were not skipped.
        self.updates, self.applied = updates, applied
        if self._settings.optimiser == "adamw_8bit":
            low_bit.set_steps(self._adam, [parameter for parameter, _ in self._parts], applied)
        elif self._adam is not None:
            for state in self._adam.state.values():
                state["step"].fill_(applied)

    def hold(self) -> UpdateResult:
        """Counts an update that changes nothing (a critic's warm-up)."""
        self.updates += 1
        return UpdateResult(0.0, 0.0, 0)

    def update(self, gradient: Tensor, weight: float, ess: float) -> UpdateResult:
        """Applies the clipped mean gradient, `gradient` / `weight`. `gradient`, the sum over
        micro-batches, is overwritten; `weight` is their `LossStatistics.divisor`, `ess` their share
        of effective samples. The update is counted and skipped without a trained token (`weight`
        0), with a gradient that is not finite, or by `ess_guard`.
        """
        rate = guarded_rate(learning_rate(self.updates, self._settings), ess, self._settings)
        self.updates += 1
        norm = float(torch.linalg.vector_norm(gradient)) / weight if weight else 0.0  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        # A NaN in the masters would end the run, and a lost batch costs little.
        if not weight or not math.isfinite(norm) or is_guarded(ess, self._settings):
            return UpdateResult(norm, rate, 1)
        clip = min(1.0, self._settings.gradient_norm_max / (norm + NORM_EPS))
        gradient.mul_(clip / weight)
        for parameter, place in self._parts:
            parameter.grad = _part(gradient, place)
        for optimiser in (self._adam, self._muon):
            if optimiser is not None:
                optimiser.param_groups[0]["lr"] = rate
                optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        self.applied += 1
        return UpdateResult(norm, rate, 0)


def _part(flat: Tensor, place: ParameterSlice | None) -> Tensor:
    return flat if place is None else place.view(flat)
