"""Computes the policy-gradient loss of a micro-batch (`surrogate_loss`) and its statistics over its
trained tokens. Pure; docs/explanation/learning.md has the formulas and sources.

π is the policy being trained, μ the policy that emitted the token. log μ was recorded by the engine
under the token's own version, so trajectories of several versions need no special case. The loss is
a *sum*: an update divides the summed gradients of its micro-batches by the sum of their weights
(numbers of tokens or of sequences), which is known only after the last micro-batch.
"""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.mismatch import LogprobGaps
from rollstream.consumers.trainer.learn.row_layout import LossInputs
from rollstream.consumers.trainer.learn.scores import TokenScores


@dataclass(frozen=True, slots=True)
class LossStatistics:
    """Holds statistics of one or more micro-batches as sums, so that the statistics of several are
    added with `+`. `weight` is the divisor of the update's gradient; the others are for metrics.

    `sequences` counts sequences with a trained token, `masked` the generated tokens that are not
    trained, `halved` the micro-batches that did not fit into memory and were split. The two maxima
    are over trained tokens, all other fields are sums over them. `ratio` is r = π/μ before
    truncation or clipping, per token or per sequence as the loss uses it; `kl` sums r − 1 − log r;
    `clipped` counts tokens whose ratio was truncated or clipped. `gaps` are the differences between
    log π and log μ that `mismatch.py` measures, in the first update of a step only.
    """

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    masked: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    clipped: float = 0.0
    lag: float = 0.0
    ratio_max: float = 0.0
    lag_max: float = 0.0
    halved: float = 0.0
    gaps: LogprobGaps = field(default_factory=LogprobGaps)

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        def combined(name: str) -> float:
            pair: tuple[float, float] = getattr(self, name), getattr(other, name)
            return max(pair) if name.endswith("_max") else sum(pair)

        names = (one.name for one in fields(LossStatistics) if one.name != "gaps")
        return LossStatistics(
            **{name: combined(name) for name in names}, gaps=self.gaps + other.gaps
        )

    def metrics(self) -> dict[str, float]:
        """Returns metrics by name: means per trained token (`loss` per `weight`), maxima and
        counts. `kl` estimates KL(μ ‖ π) (k3 of Schulman, "Approximating KL divergence", 2020).
        `ess` is the effective sample size as a share of the N trained tokens, (Σr)² / (N Σr²): 1 on
        policy, less off policy.
        """
        tokens = max(self.tokens, 1.0)
        return {
            "loss": self.loss / max(self.weight, 1.0),
            "entropy": self.entropy / tokens,
            "kl": self.kl / tokens,
            "ratio_mean": self.ratio / tokens,
            "ratio_max": self.ratio_max,
            "clipped": self.clipped / tokens,
            "ess": self.ratio**2 / max(tokens * self.ratio_squared, 1e-300),
            "lag_mean": self.lag / tokens,
            "lag_max": self.lag_max,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "masked_tokens": self.masked,
            **({"micro_batches_halved": self.halved} if self.halved else {}),
            **self.gaps.metrics(),
        }


LOG_RATIO_MAX = 20.0
"""Bound of |log r|. e²⁰ is far above any sensible ratio; without the bound one broken
log-probability gives inf · 0 and makes the update NaN.
"""


def surrogate_loss(
    scores: TokenScores, inputs: LossInputs, settings: TrainerSettings
) -> tuple[Tensor, LossStatistics]:
    """Returns the loss as a sum, not divided by its weight and differentiable in `scores.logprobs`,
    and the statistics of its tokens, with that weight. `settings` choose the formula: `loss`,
    `ratio` and `aggregate`.
    """
    log_ratio = (scores.logprobs - inputs.behaviour).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    counts = torch.bincount(inputs.sequence, minlength=inputs.sequences)
    if settings.ratio == "sequence":
        log_ratio = _sequence_means(log_ratio, inputs, counts)
    ratio = log_ratio.exp()
    if settings.loss == "truncated_is":
        weight = ratio.detach().clamp(max=settings.ratio_max)
        losses = -scores.logprobs * inputs.advantage * weight
        clipped = ratio > settings.ratio_max
    else:
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        losses = -torch.minimum(ratio * inputs.advantage, bounded * inputs.advantage)
        clipped = bounded * inputs.advantage < ratio * inputs.advantage
    if settings.aggregate == "sequence":
        losses = losses / counts[inputs.sequence]
        total_weight = float(inputs.sequences)
    else:
        total_weight = float(len(losses))
    loss = losses.sum()
    return loss, _sums(losses, total_weight, scores, inputs, log_ratio, clipped)


def _sequence_means(values: Tensor, inputs: LossInputs, counts: Tensor) -> Tensor:
    """Returns for each trained token the mean of `values` over the trained tokens of its sequence;
    `counts` has their number for each sequence.
    """
    totals = values.new_zeros(inputs.sequences).index_add(0, inputs.sequence, values)
    return (totals / counts)[inputs.sequence]


@torch.no_grad()
def _sums(
    losses: Tensor,
    weight: float,
    scores: TokenScores,
    inputs: LossInputs,
    log_ratio: Tensor,
    clipped: Tensor,
) -> LossStatistics:
    """Returns the statistics of one micro-batch, without `gaps`: the caller adds them."""
    log_ratio = log_ratio.double()
    ratio, lag = log_ratio.exp(), inputs.lag.double()
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
        sequences=float(inputs.sequences),
        masked=float(inputs.masked),
        **{name: float(value) for name, value in added.items()},
        gaps=LogprobGaps(),
    )
