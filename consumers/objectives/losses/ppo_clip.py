"""PPO's clipped surrogate, with a bound of its own on each side, and the dual clip."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from rollstream.consumers.objectives.losses.base import LossSettings, SurrogateInputs

if TYPE_CHECKING:
    from torch import Tensor


class PpoClipSettings(LossSettings):
    """The bounds of the ratio."""

    takes_proximal: ClassVar[bool] = True
    clip_low: float = Field(default=0.2, ge=0)
    """ε below 1 for `ppo_clip`."""
    clip_high: float = Field(default=0.28, ge=0)
    """ε above 1 for `ppo_clip`."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip c for `ppo_clip`: where the advantage is negative the loss is at most c · |A|."""


def ppo_clip(tokens: SurrogateInputs, settings: PpoClipSettings) -> "tuple[Tensor, Tensor]":
    """−min(r·A, clip(r)·A) (PPO, arXiv 1707.06347), with bounds of its own on each side (DAPO,
    arXiv 2503.14476) and, if `clip_dual` is set, at most c·|A| where A < 0 (dual clip, arXiv
    1912.09729).
    """
    ratio, advantage = tokens.ratio, tokens.advantage
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = -(ratio * advantage).minimum(bounded * advantage)
    clipped = bounded * advantage < ratio * advantage
    if settings.clip_dual is not None:
        loss_max = -settings.clip_dual * advantage
        is_above = (advantage < 0) & (losses > loss_max)
        losses, clipped = loss_max.where(is_above, losses), clipped | is_above
    return losses, clipped
