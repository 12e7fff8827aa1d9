"""Policy-gradient losses over trained tokens. Pure; formulas and sources are in `docs/learning.md`.

π is the policy being trained, μ the policy that emitted the token. log μ is the value that the
engine recorded under the token's own version, so spans of several versions need no special case.
The loss of a micro-batch is a *sum*: an update divides the gradients of all its micro-batches by
the sum of their weights, which is known only after the last one.
"""

# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.row_layout import LossInputs
from rollstream.consumers.trainer.learn.mismatch import LogprobGaps
from rollstream.consumers.trainer.learn.scoring import TokenScores
from rollstream.consumers.trainer.learn.sums import LossStatistics

LOG_RATIO_MAX = 20.0
"""e²⁰ is far above any sensible ratio; without the bound one broken token gives inf · 0 and makes
the update NaN.
"""


def surrogate_loss(scores: TokenScores, judged: LossInputs, settings: TrainerSettings) -> tuple[Tensor, LossStatistics]:
    """The unnormalised loss, differentiable in `scores.logprobs`, and the statistics of its
    tokens.
    """
    log_ratio = (scores.logprobs - judged.behaviour).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    counts = torch.bincount(judged.sequence, minlength=judged.sequences)
    if settings.ratio == "sequence":
        log_ratio = _sequence_means(log_ratio, judged, counts)
    ratio = log_ratio.exp()
    if settings.loss == "truncated_is":
        weight = ratio.detach().clamp(max=settings.ratio_max)
        losses = -scores.logprobs * judged.advantage * weight
        clipped = ratio > settings.ratio_max
    else:
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        losses = -torch.minimum(ratio * judged.advantage, bounded * judged.advantage)
        clipped = bounded * judged.advantage < ratio * judged.advantage
    if settings.aggregate == "sequence":
        losses = losses / counts[judged.sequence]
        total_weight = float(judged.sequences)
    else:
        total_weight = float(len(losses))
    loss = losses.sum()
    return loss, _sums(losses, total_weight, scores, judged, log_ratio, clipped)


def _sequence_means(values: Tensor, judged: LossInputs, counts: Tensor) -> Tensor:
    """[G] mean of `values` over the trained tokens of each token's sequence."""
    totals = values.new_zeros(judged.sequences).index_add(0, judged.sequence, values)
    return (totals / counts)[judged.sequence]


@torch.no_grad()
def _sums(
    losses: Tensor,
    weight: float,
    scores: TokenScores,
    judged: LossInputs,
    log_ratio: Tensor,
    clipped: Tensor,
) -> LossStatistics:
    log_ratio = log_ratio.double()
    ratio, lag = log_ratio.exp(), judged.lag.double()
    added = {
        "loss": losses.double().sum(),
        "entropy": scores.entropy.double().sum(),
        "kl": (ratio - 1 - log_ratio).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "clipped": clipped.sum(),
        "lag": lag.sum(),
        "ratio_max": ratio.max(),
        "lag_max": lag.max(),
    }
    return LossStatistics(
        weight=weight,
        tokens=float(len(losses)),
        sequences=float(judged.sequences),
        masked=float(judged.masked),
        **{name: float(value) for name, value in added.items()},
        gaps=LogprobGaps(),
    )
