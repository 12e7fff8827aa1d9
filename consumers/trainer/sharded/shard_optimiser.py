"""AdamW over this rank's slices of the parameters: the same update as in `optimiser.py`, with the
gradient's norm taken over all ranks.

Every rank receives the same weight and computes the same norm, so either all ranks apply an update
or none does.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.optimiser import NORM_EPS, UpdateResult, learning_rate


class ShardOptimiser:
    """Updates `slices` in place; `mean` and `square` are laid out like them."""

    def __init__(
        self,
        slices: Sequence[Tensor],
        settings: TrainerSettings,
        over_all_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._settings, self._over_all_ranks = settings, over_all_ranks
        self._parameters = [torch.nn.Parameter(one) for one in slices]
        self.mean = [torch.zeros_like(one) for one in slices]
        self.square = [torch.zeros_like(one) for one in slices]
        self._adam = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=1e-8,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._applied = [torch.zeros((), device=one.device) for one in slices]
        for place, parameter in enumerate(self._parameters):
            self._adam.state[parameter] = {
                "step": self._applied[place],
                "exp_avg": self.mean[place],
                "exp_avg_sq": self.square[place],
            }
        self.updates = 0
        self.applied = 0
        """Updates that were not skipped."""

    def load(self, updates: int, applied: int) -> None:
        """Set the counters."""
        self.updates, self.applied = updates, applied
        for one in self._applied:
            one.fill_(applied)

    def update(self, gradients: Sequence[Tensor | None], weight: float) -> UpdateResult:
        """Apply one update by Σ gradients / `weight`, clipped; gradients are overwritten. The
        update is skipped if no token was trained or the norm is not finite.
        """
        rate = learning_rate(self.updates, self._settings)
        self.updates += 1
        norm = self._norm(gradients) / weight if weight else 0.0
        if not weight or not math.isfinite(norm):
            return UpdateResult(norm, rate, 1)
        scale = min(1.0, self._settings.gradient_norm_max / (norm + NORM_EPS)) / weight
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # None only for a parameter that no rank's forward used.
            parameter.grad = (
                torch.zeros_like(parameter) if gradient is None else gradient.mul_(scale)
            )
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.applied += 1
        return UpdateResult(norm, rate, 0)

    def _norm(self, gradients: Sequence[Tensor | None]) -> float:
        squares = [g.double().square().sum().cpu() for g in gradients if g is not None]
        mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return math.sqrt(float(self._over_all_ranks(mine)))
