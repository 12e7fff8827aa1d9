"""The policy gradient with truncated importance weights."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rollstream.consumers.objectives.losses.base import Bounds, LossSettings, SurrogateInputs

if TYPE_CHECKING:
    from torch import Tensor


class TruncatedIsSettings(LossSettings):
    """The bounds of the weight; those of `trainer.proximal`'s weight, too."""

    takes_no_ratio: ClassVar[bool] = True
    ratio_max: float = Field(default=2.0, gt=0)
    """Truncation of π/μ for `truncated_is`."""
    ratio_min: float = Field(default=0.0, ge=0)
    """Smallest weight for `truncated_is`: smaller ratios are raised to it."""
    ratio_bounds_negative: Bounds | None = None
    """`ratio_min` and `ratio_max` where the advantage is negative; null: the same."""


def truncated_is(tokens: SurrogateInputs, settings: TruncatedIsSettings) -> "tuple[Tensor, Tensor]":
    """−log π · A · w, where the weight w is the ratio within its bounds, without gradient (IMPALA,
    arXiv 1802.01561; CISPO, arXiv 2506.13585). TOPR (arXiv 2503.14286) bounds the weight otherwise
    where A < 0.
    """
    ratio, advantage = tokens.ratio.detach(), tokens.advantage
    weight = ratio.clamp(settings.ratio_min, settings.ratio_max)
    if settings.ratio_bounds_negative is not None:
        bounded = ratio.clamp(*settings.ratio_bounds_negative)
        weight = bounded.where(advantage < 0, weight)
    return -tokens.logprobs * advantage * weight, weight != ratio
