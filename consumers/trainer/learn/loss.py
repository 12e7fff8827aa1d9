"""The policy-gradient loss of a micro-batch (`surrogate_loss`) and its statistics. Pure;
docs/explanation/learning.md has the formulas and sources. π is the policy being trained; log μ was
recorded under each token's own version, so trajectories of several versions need no special case.
The loss is a *sum*: its divisor is known only after the update's last micro-batch.
"""

import math
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.trainer.data.credit import GAE
from rollstream.consumers.trainer.data.prepare import EPS
from rollstream.consumers.trainer.learn.mismatch import LogprobGaps
from rollstream.consumers.trainer.learn.row_layout import LossInputs
from rollstream.consumers.trainer.learn.scores import TokenScores
from rollstream.consumers.trainer.learn.surrogates import (
    SurrogateInputs,
    bounded_log_ratio,
    find_surrogate,
    importance_log_ratio,
    kept_tokens,
    kl_to_come,
    reference_kl,
)


@dataclass(frozen=True, slots=True)
class LossStatistics:
    """Statistics of micro-batches as sums, added with `+`; the two maxima are over trained tokens.
    `weight` is the divisor of the update's gradient.

    `masked` counts generated tokens that are not trained, `halved` micro-batches that did not fit
    into memory. `ratio` is r = π/μ before truncation or clipping, as the loss uses it; `kl` sums r
    − 1 − log r; `clipped` counts truncated or clipped ratios, `outliers` tokens that a mask took
    out of the loss. `advantage_squared` is over sequences. `gaps` (`mismatch.py`) are those of a
    step's first update only.
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
    outliers: float = 0.0
    reference_kl: float = 0.0
    advantage_squared: float = 0.0
    halved: float = 0.0
    gaps: LogprobGaps = field(default_factory=LogprobGaps)

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        def combined(name: str) -> float:
            pair: tuple[float, float] = getattr(self, name), getattr(other, name)
            return max(pair) if name.endswith("_max") else sum(pair)

        names = (f.name for f in fields(LossStatistics) if f.name != "gaps")
        return LossStatistics(
            **{name: combined(name) for name in names}, gaps=self.gaps + other.gaps
        )

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the N trained tokens, (Σr)² / (N Σr²): 1 on policy,
        less off policy.
        """
        return self.ratio**2 / max(max(self.tokens, 1.0) * self.ratio_squared, 1e-300)

    def divisor(self, advantage: str) -> float:
        """Returns the divisor of the update's summed gradient."""
        if advantage != "batch":
            return self.weight
        # The update's advantages have mean 0, as each group's do. Losses are proportional to them,
        # so dividing the gradient divides them, and no micro-batch waits for the last group.
        deviation = math.sqrt(self.advantage_squared / max(self.sequences - 1, 1.0))
        return self.weight * (deviation + EPS)

    def metrics(self) -> dict[str, float]:
        """Returns means per trained token (`loss` per `weight`), maxima and counts. `kl` estimates
        KL(μ ‖ π) (k3 of Schulman, "Approximating KL divergence", 2020).
        """
        tokens = max(self.tokens, 1.0)
        return {
            "loss": self.loss / max(self.weight, 1.0),
            "entropy": self.entropy / tokens,
            "kl": self.kl / tokens,
            "ratio_mean": self.ratio / tokens,
            "ratio_max": self.ratio_max,
            "clipped": self.clipped / tokens,
            "ess": self.ess,
            "lag_mean": self.lag / tokens,
            "lag_max": self.lag_max,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "masked_tokens": self.masked,
            **({"outliers": self.outliers / tokens} if self.outliers else {}),
            **({"reference_kl": self.reference_kl / tokens} if self.reference_kl else {}),
            **({"micro_batches_halved": self.halved} if self.halved else {}),
            **self.gaps.metrics(),
        }


@dataclass(frozen=True, slots=True)
class OtherLogprobs:
    """Log-probabilities [G] of the trained tokens under other policies, without gradient:
    `reference` where `reference_kl` is not 0, `proximal` where that is set.
    """

    reference: Tensor | None = None
    proximal: Tensor | None = None


NO_OTHERS = OtherLogprobs()


def surrogate_loss(
    scores: TokenScores,
    inputs: LossInputs,
    settings: ObjectiveSettings,
    others: OtherLogprobs = NO_OTHERS,
) -> tuple[Tensor, LossStatistics]:
    """Returns the loss as a sum, differentiable in `scores` and not divided by its weight, and the
    statistics of its tokens, with that weight.
    """
    counts = torch.bincount(inputs.sequence, minlength=inputs.sequences)
    token_log_ratio = bounded_log_ratio(scores.logprobs, inputs.behaviour)
    log_ratio = importance_log_ratio(token_log_ratio, inputs, counts, settings.ratio)
    in_reward = settings.reference_kl_in == "reward"
    estimates = _kl_estimates(inputs.behaviour if in_reward else scores.logprobs, others, settings)
    rewarded = inputs
    if estimates is not None and in_reward and settings.advantage != GAE:
        lost = settings.reference_kl * kl_to_come(estimates, inputs, counts)
        rewarded = replace(inputs, advantage=inputs.advantage - lost)
    if settings.proximal:
        losses, clipped = _decoupled(scores.logprobs, rewarded, counts, settings, others)
    else:
        tokens = SurrogateInputs(scores.logprobs, log_ratio, rewarded)
        losses, clipped = find_surrogate(settings.loss)(tokens, settings)
    unmasked = kept_tokens(token_log_ratio.detach(), inputs, counts, settings)
    if unmasked is not None:
        losses = torch.where(unmasked, losses, 0.0)
    if settings.ratio_penalty:
        losses = losses + settings.ratio_penalty * token_log_ratio.square()
    if settings.entropy_bonus:
        losses = losses - settings.entropy_bonus * scores.entropy
    if estimates is not None and not in_reward:
        losses = losses + settings.reference_kl * estimates
    losses, total_weight = aggregated(losses, inputs, settings)
    outliers = 0.0 if unmasked is None else float((~unmasked).sum())
    sums = _sums(losses, total_weight, scores, inputs, log_ratio, clipped)
    distance = 0.0 if estimates is None else float(estimates.detach().double().sum())
    return losses.sum(), replace(sums, outliers=outliers, reference_kl=distance)


def reward_penalties(
    inputs: LossInputs, others: OtherLogprobs, settings: ObjectiveSettings
) -> Tensor | None:
    """Returns the KL to the reference that is taken from the reward of each token [G]; None if it
    is not in the reward.
    """
    if settings.reference_kl_in != "reward":
        return None
    # A critic counts it before it makes advantages; `surrogate_loss` then does not.
    estimates = _kl_estimates(inputs.behaviour, others, settings)
    return None if estimates is None else settings.reference_kl * estimates


def _kl_estimates(
    logprobs: Tensor, others: OtherLogprobs, settings: ObjectiveSettings
) -> Tensor | None:
    if not settings.reference_kl:
        return None
    assert others.reference is not None, "reference_kl needs the reference's log-probabilities"
    return reference_kl(logprobs, others.reference, settings.reference_kl_form)


def _decoupled(
    logprobs: Tensor,
    inputs: LossInputs,
    counts: Tensor,
    settings: ObjectiveSettings,
    others: OtherLogprobs,
) -> tuple[Tensor, Tensor]:
    # The surrogate around the proximal policy, times the bounded weight proximal/μ (arXiv
    # 2110.00641; AReaL, arXiv 2505.24298, eq. 5).
    proximal = others.proximal
    assert proximal is not None, "proximal needs the proximal policy's log-probabilities"
    moved = importance_log_ratio(
        bounded_log_ratio(logprobs, proximal), inputs, counts, settings.ratio
    )
    tokens = SurrogateInputs(logprobs, moved, inputs)
    losses, clipped = find_surrogate(settings.loss)(tokens, settings)
    proximal_log_ratio = bounded_log_ratio(proximal, inputs.behaviour)
    ratio = importance_log_ratio(proximal_log_ratio, inputs, counts, settings.ratio).exp()
    weight = ratio.clamp(settings.ratio_min, settings.ratio_max)
    return losses * weight, clipped | (weight != ratio)


def aggregated(
    losses: Tensor, inputs: LossInputs, settings: ObjectiveSettings
) -> tuple[Tensor, float]:
    """Returns the losses [G], each with its share in its sequence or prompt, and the total weight
    by which an update divides their sum; weights of micro-batches add up.
    """
    counts = torch.bincount(inputs.sequence, minlength=inputs.sequences)
    match settings.aggregate:
        case "token":
            return losses, float(len(losses))
        case "sequence":
            return losses / counts[inputs.sequence], float(inputs.sequences)
        case "prompt":
            share = inputs.prompt_share[inputs.sequence]
            return losses * share, float((inputs.prompt_share.double() * counts).sum())
        case "constant":
            return losses / settings.aggregate_tokens, float(inputs.sequences)


@torch.no_grad()
def _sums(
    losses: Tensor,
    weight: float,
    scores: TokenScores,
    inputs: LossInputs,
    log_ratio: Tensor,
    clipped: Tensor,
) -> LossStatistics:
    log_ratio = log_ratio.double()
    ratio, lag = log_ratio.exp(), inputs.lag.double()
    by_sequence = inputs.advantage.new_zeros(inputs.sequences)
    by_sequence[inputs.sequence] = inputs.advantage  # equal for all tokens of a sequence
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
        "advantage_squared": by_sequence.double().square().sum(),
    }
    return LossStatistics(
        weight=weight,
        tokens=float(len(losses)),
        sequences=float(inputs.sequences),
        masked=float(inputs.masked),
        **{name: float(value) for name, value in added.items()},
        gaps=LogprobGaps(),
    )
