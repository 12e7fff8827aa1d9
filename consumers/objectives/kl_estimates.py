"""Estimates of the KL to a reference policy, per trained token (`trainer.reference_kl`)."""

import torch
from torch import Tensor

from rollstream.consumers.objectives.losses.base import LossInputs
from rollstream.consumers.objectives.ratios import bounded_log_ratio


def reference_kl(logprobs: Tensor, reference: Tensor, form: str) -> Tensor:
    """Returns KL(π ‖ reference) for each trained token, differentiable in `logprobs` (Schulman,
    "Approximating KL divergence", 2020): `k1`, `k2` or `k3`.
    """
    log_ratio = bounded_log_ratio(logprobs, reference)
    if form == "k1":
        return log_ratio
    if form == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio


@torch.no_grad()
def kl_to_come(estimates: Tensor, inputs: LossInputs, counts: Tensor) -> Tensor:
    """The sum of `estimates` [G] over each trained token and the later ones of its sequence: what a
    KL in the reward of each token takes from its return (REINFORCE++, arXiv 2501.03262). Sequences,
    of `counts` trained tokens, follow each other.
    """
    exact = estimates.double()
    up_to = exact.cumsum(0)
    ends = up_to[counts.cumsum(0) - 1][inputs.sequence]
    return (ends - up_to + exact).to(estimates.dtype)
