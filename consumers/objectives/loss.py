"""The policy-gradient loss of a micro-batch and its statistics. Pure; docs/explanation/learning.md
has the formulas and sources. π is the policy being trained; log μ was recorded under each token's
own version, so trajectories of several versions need no special case. The loss is a *sum*: its
divisor is known only after the update's last micro-batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollstream.consumers.credit import GAE
from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.objectives.kl_estimates import kl_to_come, reference_kl
from rollstream.consumers.objectives.losses.base import LossInputs, SurrogateInputs
from rollstream.consumers.objectives.losses.kinds import find_surrogate
from rollstream.consumers.objectives.masks import kept_tokens
from rollstream.consumers.objectives.ratios import bounded_log_ratio, importance_log_ratio
from rollstream.consumers.trainer.data.advantages import EPS
from rollstream.consumers.trainer.learn.mismatch import LogprobGaps
from rollstream.consumers.trainer.learn.scores import TokenScores
from rollstream.consumers.trainer.learn.statistics import LossStatistics


@dataclass(frozen=True, slots=True)
class OtherLogprobs:
    """The other logprobs of the trained tokens [G], without gradient: `reference` where
    `reference_kl` is not 0, `proximal` where that is set.
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
    """A sum, differentiable in `scores` and not divided by its weight, and the statistics of its
    tokens, with that weight.
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
    sums: dict[str, float] = {}
    if unmasked is not None:
        sums["outliers"] = float((~unmasked).sum())
    if estimates is not None:
        sums["reference_kl"] = float(estimates.detach().double().sum())
    statistics = _statistics(losses, total_weight, scores, inputs, log_ratio, clipped, sums)
    return losses.sum(), statistics


def objective_means(statistics: LossStatistics) -> dict[str, float]:
    """Returns the means per trained token, of the sums that only some losses have."""
    tokens = max(statistics.tokens, 1.0)
    return {name: total / tokens for name, total in statistics.objective_sums.items() if total}


def update_divisor(statistics: LossStatistics, advantage: str) -> float:
    if advantage != "batch":
        return statistics.weight
    # The update's advantages have mean 0, as each group's do. Losses are proportional to them, so
    # dividing the gradient divides them, and no micro-batch waits for the last group.
    deviation = math.sqrt(statistics.advantage_squared / max(statistics.sequences - 1, 1.0))
    return statistics.weight * (deviation + EPS)


def reward_penalties(
    inputs: LossInputs, others: OtherLogprobs, settings: ObjectiveSettings
) -> Tensor | None:
    """The KL to the reference that is taken from the reward of each token [G]; None if it is not in
    the reward.
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
    """The losses [G], each with its share in its sequence or prompt, and the total weight by which
    an update divides their sum; weights of micro-batches add up.
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
def _statistics(
    losses: Tensor,
    weight: float,
    scores: TokenScores,
    inputs: LossInputs,
    log_ratio: Tensor,
    clipped: Tensor,
    objective_sums: Mapping[str, float],
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
        objective_sums=objective_sums,
        gaps=LogprobGaps(),
    )
