"""Updates one rank's slices of the parameters."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn import masters


class ShardOptimiser:
    """Updates this rank's slices in place by AdamW as `learn/masters.py` does, with the norm of the
    whole gradient: `over_all_ranks` sums a tensor. `mean` and `square` are the moments of each of
    `slices`. Every rank gets the same weight and norm, so all apply an update or all skip it.
    """

    def __init__(
        self,
        slices: Sequence[Tensor],
        settings: TrainerSettings,
        over_all_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._settings, self._over_all_ranks = settings, over_all_ranks
        self._parameters = [torch.nn.Parameter(rows) for rows in slices]
        self.mean = [torch.zeros_like(rows) for rows in slices]
        self.square = [torch.zeros_like(rows) for rows in slices]
        self._adam = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=1e-8,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._applied = [torch.zeros((), device=rows.device) for rows in slices]
        for index, parameter in enumerate(self._parameters):
            self._adam.state[parameter] = {
                "step": self._applied[index],
                "exp_avg": self.mean[index],
                "exp_avg_sq": self.square[index],
            }
        self.updates = 0
        self.applied = 0

    def load(self, updates: int, applied: int) -> None:
        """Loads from a checkpoint; the caller copies its moments. Not a collective."""
        self.updates, self.applied = updates, applied
        for count in self._applied:
            count.fill_(applied)

    def hold(self) -> masters.UpdateResult:
        """Works as `Optimiser.hold`. Not a collective."""
        self.updates += 1
        return masters.UpdateResult(0.0, 0.0, 0)

    def update(
        self, gradients: Sequence[Tensor | None], weight: float, ess: float
    ) -> masters.UpdateResult:
        """Updates as `Optimiser.update`; overwrites the gradients. `weight` and `ess` are those of
        all ranks.
        """
        rate = masters.learning_rate(self.updates, self._settings)
        rate = masters.guarded_rate(rate, ess, self._settings)
        self.updates += 1
        norm = self._norm(gradients) / weight if weight else 0.0
        is_guarded = masters.is_guarded(ess, self._settings)
        if not weight or not math.isfinite(norm) or is_guarded:
            return masters.UpdateResult(norm, rate, 1)
        scale = min(1.0, self._settings.gradient_norm_max / (norm + masters.NORM_EPS)) / weight
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # None only for a parameter that no rank's forward used.
            parameter.grad = (
                torch.zeros_like(parameter) if gradient is None else gradient.mul_(scale)
            )
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()  # pyright: ignore[reportUnknownMemberType]
        self._adam.zero_grad(set_to_none=True)
        self.applied += 1
        return masters.UpdateResult(norm, rate, 0)

    def _norm(self, gradients: Sequence[Tensor | None]) -> float:
        squares = [g.double().square().sum().cpu() for g in gradients if g is not None]
        mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return math.sqrt(float(self._over_all_ranks(mine)))
