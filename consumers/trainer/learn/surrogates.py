"""The parts of a loss that a configuration combines: importance ratios, surrogates and masks
against outliers. Pure functions over the trained tokens of a micro-batch;
docs/explanation/learning.md has formulas and papers. π is the policy being trained, μ the policy
that emitted the token, A the advantage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor

from rollstream.consumers.objective_settings import LOSS_NAMES, ObjectiveSettings
from rollstream.consumers.trainer.learn.row_layout import LossInputs
from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable

LOG_RATIO_MAX = 20.0
"""Bound of |log r|. e²⁰ is far above any sensible ratio; without it one broken log-probability
gives inf · 0 and makes the update NaN.
"""


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """Holds what a surrogate gets about the G trained tokens of a micro-batch: `logprobs` [G] under
    π and `log_ratio` [G], log π/μ of the token or of its sequence (`trainer.ratio`), both
    differentiable, and the rest in `batch`, which has no gradient.
    """

    logprobs: Tensor
    log_ratio: Tensor
    batch: LossInputs

    @property
    def ratio(self) -> Tensor:
        """π/μ [G], differentiable."""
        return self.log_ratio.exp()

    @property
    def advantage(self) -> Tensor:
        """A [G]; equal for all tokens of a sequence."""
        return self.batch.advantage


Surrogate = Callable[[SurrogateInputs, ObjectiveSettings], tuple[Tensor, Tensor]]
"""Returns the loss [G] of each token, differentiable, and whether [G] its ratio was truncated,
clipped or masked. It must be pure and treat each sequence alone, so that the losses of
micro-batches add up; `check_surrogate` tries that.
"""


def truncated_is(tokens: SurrogateInputs, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """−log π · A · w, where the weight w is the ratio within its bounds, without gradient (IMPALA,
    arXiv 1802.01561; CISPO, arXiv 2506.13585). TOPR (arXiv 2503.14286) bounds the weight otherwise
    where A < 0.
    """
    ratio, advantage = tokens.ratio.detach(), tokens.advantage
    low, high = settings.ratio_min, settings.ratio_max
    weight = ratio.clamp(low, high)
    if settings.ratio_bounds_negative is not None:
        bounded = ratio.clamp(*settings.ratio_bounds_negative)
        weight = torch.where(advantage < 0, bounded, weight)
    return -tokens.logprobs * advantage * weight, weight != ratio


def ppo_clip(tokens: SurrogateInputs, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r)·A) (PPO, arXiv 1707.06347), with bounds of its own on each side (DAPO,
    arXiv 2503.14476) and, if `clip_dual` is set, at most c·|A| where A < 0 (dual clip, arXiv
    1912.09729).
    """
    ratio, advantage = tokens.ratio, tokens.advantage
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = -torch.minimum(ratio * advantage, bounded * advantage)
    clipped = bounded * advantage < ratio * advantage
    if settings.clip_dual is not None:
        loss_max = -settings.clip_dual * advantage
        is_above = (advantage < 0) & (losses > loss_max)
        losses, clipped = torch.where(is_above, loss_max, losses), clipped | is_above
    return losses, clipped


def dppo(tokens: SurrogateInputs, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """−r·A, without a loss where the token's probability has moved by more than `divergence_max`
    and the update would move it further: r > 1 at A > 0, r < 1 at A < 0 (DPPO's binary
    total-variation mask, arXiv 2602.04879).
    """
    with torch.no_grad():
        behaviour = tokens.batch.behaviour.exp()
        moved = (tokens.logprobs.exp() - behaviour).abs()
        is_outward = (tokens.log_ratio * tokens.advantage) > 0
        masked = (moved > settings.divergence_max) & is_outward
    losses = -tokens.ratio * tokens.advantage
    return torch.where(masked, 0.0, losses), masked


SURROGATES: Mapping[str, Surrogate] = dict(
    zip(LOSS_NAMES, (truncated_is, ppo_clip, dppo), strict=True)
)


@cache
def find_surrogate(name: str) -> Surrogate:
    """Returns the surrogate that `trainer.loss` names. Raises `ConfigurationError` if it is neither
    built in nor a callable at an import path.
    """
    if name in SURROGATES:
        return SURROGATES[name]
    if ":" not in name:
        names = ", ".join(SURROGATES)
        raise ConfigurationError(f"trainer.loss: {name!r} is neither of {names} nor 'module:name'")
    return cast(Surrogate, find_callable(name, "trainer.loss"))


def importance_log_ratio(
    token_log_ratio: Tensor, inputs: LossInputs, counts: Tensor, level: str
) -> Tensor:
    """Returns log π/μ of each trained token at the `level` of `trainer.ratio`: `token`; `sequence`,
    the mean over its sequence's trained tokens (GSPO, arXiv 2507.18071); `product`, their sum; 0
    for `none`. `counts` are the trained tokens of each sequence.
    """
    if level == "token":
        return token_log_ratio
    if level == "none":
        return torch.zeros_like(token_log_ratio)
    totals = sequence_sums(token_log_ratio, inputs)
    if level == "sequence":
        return (totals / counts)[inputs.sequence]
    return totals.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)[inputs.sequence]


def reference_kl(logprobs: Tensor, reference: Tensor, form: str) -> Tensor:
    """Returns an estimate of KL(π ‖ reference) for each trained token, differentiable in `logprobs`
    (Schulman, "Approximating KL divergence", 2020): `k1`, `k2` or `k3`.
    """
    log_ratio = bounded_log_ratio(logprobs, reference)
    if form == "k1":
        return log_ratio
    if form == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio


@torch.no_grad()
def kl_to_come(estimates: Tensor, inputs: LossInputs, counts: Tensor) -> Tensor:
    """Returns for each trained token the sum of `estimates` [G] over it and the later ones of its
    sequence: what a KL in the reward of each token takes from its return (REINFORCE++, arXiv
    2501.03262). Sequences, of `counts` trained tokens, follow each other.
    """
    exact = estimates.double()
    up_to = exact.cumsum(0)
    ends = up_to[counts.cumsum(0) - 1][inputs.sequence]
    return (ends - up_to + exact).to(estimates.dtype)


def bounded_log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Returns the log ratio [G] of two policies, within `LOG_RATIO_MAX`."""
    return (logprobs - others).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def sequence_sums(values: Tensor, inputs: LossInputs) -> Tensor:
    """Returns the sum of `values` [G] over each sequence."""
    return values.new_zeros(inputs.sequences).index_add(0, inputs.sequence, values)


@torch.no_grad()
def kept_tokens(
    token_log_ratio: Tensor, inputs: LossInputs, counts: Tensor, settings: ObjectiveSettings
) -> Tensor | None:
    """Returns which tokens [G] keep their loss; None if no mask is set.

    `mask_ratio` compares the token's own ratio (IcePop; masked importance sampling),
    `mask_sequence` the geometric mean over its sequence, `mask_negative` the mean log μ/π of
    sequences with A < 0 (off-policy sequence mask of DeepSeek-V3.2).
    """
    # Masked tokens count in the total weight: a mask does not raise the weight of the others.
    unmasked: Tensor | None = None
    if settings.mask_ratio is not None:
        unmasked = _is_inside(token_log_ratio.exp(), settings.mask_ratio)
    if settings.mask_sequence is None and settings.mask_negative is None:
        return unmasked
    means = sequence_sums(token_log_ratio, inputs) / counts
    if settings.mask_sequence is not None:
        inside = _is_inside(means.exp(), settings.mask_sequence)[inputs.sequence]
        unmasked = inside if unmasked is None else unmasked & inside
    if settings.mask_negative is not None:
        near = (-means <= settings.mask_negative)[inputs.sequence] | (inputs.advantage >= 0)
        unmasked = near if unmasked is None else unmasked & near
    return unmasked


def _is_inside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (values >= bounds[0]) & (values <= bounds[1])
