"""Samples: temperature, top-k, top-p, then the inverse of the cumulative distribution. A token is a
function of the row's logits, its sampling parameters and one uniform number (invariant 10).
docs/explanation/engine.md compares Gumbel noise.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from rollstream.streams.values import Sampling

NO_TOKEN = -1  # pads stop tokens: equals no token


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Parameters of shape (rows, 1), or (1, 1) if all rows are equal; None: no row uses it."""

    inverse_temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool
    stops: torch.Tensor
    """Stop tokens of each row: (largest number of them, rows or 1), padded with `NO_TOKEN`."""

    def of_tokens(self, row_of: torch.Tensor) -> "SamplingPlan":
        """Returns a plan by token; `row_of` (n,) is the row of each. `stops` is not expanded."""
        if self.stops.shape[1] == 1:  # all rows have equal parameters
            return self

        def spread(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None or values.shape[0] == 1:
                return values
            return values.index_select(0, row_of)

        return replace(
            self,
            inverse_temperature=spread(self.inverse_temperature),
            top_k=spread(self.top_k),
            top_p=spread(self.top_p),
            greedy=spread(self.greedy),
        )


def plan_sampling(rows: Sequence[Sampling], device: torch.device) -> SamplingPlan:
    """Returns the rows' plan; that of one `Sampling` fits any number of equal rows."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    greedy = [row.temperature == 0 for row in rows]
    scaled = any(row.temperature not in (0, 1) for row in rows)
    filtered = any(row.top_k > 0 or row.top_p < 1 for row in rows)
    width = max(1, *(len(row.stop) for row in rows))
    stops = [[*row.stop, *[NO_TOKEN] * (width - len(row.stop))] for row in rows]
    # A row without a filter keeps every token, whatever the rounding of its cumulative sum.
    return SamplingPlan(
        inverse_temperature=column([1 / (row.temperature or 1) for row in rows], torch.float32)
        if scaled
        else None,
        top_k=column([row.top_k or 2**62 for row in rows], torch.int64) if filtered else None,
        top_p=column([row.top_p if row.top_p < 1 else 2.0 for row in rows], torch.float32)
        if filtered
        else None,
        greedy=column([float(value) for value in greedy], torch.bool) if any(greedy) else None,
        all_greedy=all(greedy),
        stops=torch.tensor(stops, dtype=torch.int64, device=device).t().contiguous(),
    )


class SamplingPlanCache:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kinds: Counter[Sampling] = Counter()
        self._plan_of_kind: dict[Sampling, SamplingPlan] = {}

    def enter(self, sampling: Sampling) -> None:
        self._kinds[_kind(sampling)] += 1

    def leave(self, sampling: Sampling) -> None:
        kind = _kind(sampling)
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]

    def plan(self, rows: Iterable[Sampling]) -> SamplingPlan:
        if len(self._kinds) > 1:
            return plan_sampling(list(rows), self.device)
        (kind,) = self._kinds
        if kind not in self._plan_of_kind:
            self._plan_of_kind = {kind: plan_sampling([kind], self.device)}
        return self._plan_of_kind[kind]


def _kind(sampling: Sampling) -> Sampling:
    # A draw does not depend on it.
    return replace(sampling, tokens_max=0)


def processed_logprobs(logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Returns log-probabilities in fp32 (rows, vocabulary) after temperature, top-k and top-p, in
    transformers' order.
    """
    scores = logits.float()
    if plan.inverse_temperature is not None:
        scores = scores * plan.inverse_temperature
    if plan.top_k is not None and plan.top_p is not None:
        scores = _filtered(scores, plan.top_k, plan.top_p)
    return scores.log_softmax(-1)


def _filtered(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    descending, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    descending = descending.masked_fill(ranks >= top_k, -torch.inf)
    probabilities = descending.softmax(-1)
    above = probabilities.cumsum(-1) - probabilities
    descending = descending.masked_fill(above >= top_p, -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, descending)


def inverse_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns tokens (n, 1): the first at which the row's cumulated probabilities exceed its
    uniform number in [0, 1).
    """
    # In float64, so a token changes only if rounding of the logits moves a boundary across the
    # uniform number.
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the total, so that rounding cannot move a draw beyond the last possible token.
    return torch.searchsorted(cumulated, cumulated[:, -1:] * uniforms, right=True)


def draw_tokens(
    logits: torch.Tensor, plan: SamplingPlan, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and log-probabilities, both (n, 1), for logits (n, vocabulary). Greedy rows
    (`temperature` 0) get the largest logit, with its log-probability at temperature 1.
    """
    logprobs = processed_logprobs(logits, plan)
    if plan.all_greedy:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        tokens = inverse_cdf(logprobs, uniforms)
        if plan.greedy is not None:
            tokens = torch.where(plan.greedy, logits.argmax(-1, keepdim=True), tokens)
    return tokens, logprobs.gather(1, tokens)
