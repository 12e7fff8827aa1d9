"""Log-probability and entropy of given tokens from logits, at the temperature at which they were
sampled.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGITS_MAX = 1 << 24
"""Logits in memory at once: 64 MiB as float32. A large vocabulary is scored in slices whose logits
are recomputed in the backward pass; otherwise 4 096 tokens over a vocabulary of 150 000 would hold
2.4 GB three times over.
"""


class TokenScores(NamedTuple):
    """Log-probabilities [G], with gradient, and entropies [G] of the distributions in nats, without
    gradient.
    """

    logprobs: Tensor
    entropy: Tensor


class _ScoreFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
        probabilities = logprobs.exp()
        entropy = torch.linalg.vecdot(probabilities, logprobs).neg_()
        ctx.save_for_backward(probabilities, targets, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs.gather(1, targets[:, None]).squeeze(1), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """d log p(target) / d logit = (1[target] − p) / T."""
        probabilities, targets, temperature = ctx.saved_tensors
        scaled = (grad / temperature)[:, None]
        return (probabilities * -scaled).scatter_add_(1, targets[:, None], scaled), None, None


def score(logits: Tensor, targets: Tensor, temperature: Tensor) -> TokenScores:
    """Scores of `targets` [G] under `logits` [G, V] divided by `temperature` [G], in float32."""
    return TokenScores(*_ScoreFunction.apply(logits.float(), targets, temperature))  # pyright: ignore


def score_hidden(hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> TokenScores:
    """Scores under `hidden` [G, d] @ `head` [V, d] transposed, at most `LOGITS_MAX` logits at a
    time.
    """
    return score_through(
        lambda some: F.linear(some, head), head.shape[0], hidden, targets, temperature
    )


def score_through(
    logits_of: Callable[[Tensor], Tensor],
    vocabulary: int,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
) -> TokenScores:
    """Scores under `logits_of(hidden)`, [g, d] → [g, vocabulary], at most `LOGITS_MAX` logits at a
    time.
    """
    rows = max(1, LOGITS_MAX // vocabulary)
    if len(targets) <= rows:
        return score(logits_of(hidden), targets, temperature)

    def score_slice(hidden: Tensor, targets: Tensor, temperature: Tensor) -> TokenScores:
        return score(logits_of(hidden), targets, temperature)

    slices = zip(hidden.split(rows), targets.split(rows), temperature.split(rows), strict=True)
    parts: list[TokenScores] = [
        checkpoint(score_slice, h, t, c, use_reentrant=False, preserve_rng_state=False)
        for h, t, c in slices
    ]  # pyright: ignore[reportAssignmentType]
    return TokenScores(torch.cat([p.logprobs for p in parts]), torch.cat([p.entropy for p in parts]))
