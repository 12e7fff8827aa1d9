"""AdamW over the flat masters, with clipping by global norm and a learning rate that is a function
of the update's number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings

NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def learning_rate(update: int, settings: TrainerSettings) -> float:
    """Learning rate of update `update` (0 is the first): a linear warm-up times a linear decay from
    1 to `lr_final` at the last update.
    """
    last = settings.steps * settings.updates_per_step - 1
    ramp = min(1.0, (update + 1) / max(1, settings.lr_ramp_steps))
    gone = min(1.0, update / last) if last > 0 else 0.0
    return settings.lr * ramp * (1 - (1 - settings.lr_final) * gone)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of an update: gradient norm before clipping, learning rate, 0 or 1 updates skipped."""

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
