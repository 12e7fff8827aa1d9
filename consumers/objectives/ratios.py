"""Importance ratios π/μ of tokens and answers (`trainer.ratio`). π is the policy being trained, μ
the policy that emitted the token.
"""

import torch
from torch import Tensor

from rollstream.consumers.objectives.losses.base import LossInputs

LOG_RATIO_MAX = 20.0
"""Of |log r|. e²⁰ is far above any sensible ratio; without it one broken log-probability gives inf
· 0 and makes the update NaN.
"""


def bounded_log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    return (logprobs - others).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


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


def sequence_sums(values: Tensor, inputs: LossInputs) -> Tensor:
    return values.new_zeros(inputs.sequences).index_add(0, inputs.sequence, values)
