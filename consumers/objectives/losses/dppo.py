"""Divergence PPO: a token that has moved too far from the policy that emitted it has no loss."""

from typing import TYPE_CHECKING

from pydantic import Field

from rollstream.consumers.objectives.losses.base import LossSettings, SurrogateInputs

if TYPE_CHECKING:
    from torch import Tensor


class DppoSettings(LossSettings):
    """The bound of the divergence."""

    divergence_max: float = Field(default=0.2, gt=0, le=1)
    """Largest |π − μ| of the token for `dppo`; beyond it a token that would move on is masked."""


def dppo(tokens: SurrogateInputs, settings: DppoSettings) -> "tuple[Tensor, Tensor]":
    """−r·A, without a loss where the token's probability has moved by more than `divergence_max`
    and the update would move it further: r > 1 at A > 0, r < 1 at A < 0 (DPPO's binary
    total-variation mask, arXiv 2602.04879).
    """
    moved = (tokens.logprobs.detach().exp() - tokens.batch.behaviour.exp()).abs()
    is_outward = (tokens.log_ratio.detach() * tokens.advantage) > 0
    masked = (moved > settings.divergence_max) & is_outward
    return (-tokens.ratio * tokens.advantage).where(~masked, 0.0), masked
