"""The published objectives, written again from their papers in float64, one function each; those
with a further policy are in `further_policies.py`, which lists all. Import it as
`testbed.objectives.reference` everywhere.

Nothing here comes from the trainer: bounds, advantages and normalisers are stated again. Groups
have one size, so a mean over answers is a mean over prompts, as the papers have it. An objective is
a loss, so it has the opposite sign of what a paper maximises. Critics are left out, and KL terms in
the objectives of presets. Where a paper treats a weight as a constant (a stopped gradient), the
weight is computed from `now` and not from `new`, so that a difference quotient in `new` is the
gradient that the paper means.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its reward, log μ of its tokens under the policy that drew them, and their
    log-probabilities under the reference policy of a KL term and under a proximal policy.
    """

    reward: float
    old: tuple[float, ...]
    reference: tuple[float, ...] = ()
    proximal: tuple[float, ...] = ()


Group = Sequence[Answer]
"""The answers to one prompt."""
Policy = Sequence[Sequence[Tensor]]
"""log π of the tokens of each answer of each group."""
Objective = Callable[[Sequence[Group], Policy, Policy], Tensor]
"""The loss of (groups, new, now); `now` has the values of `new` and no gradient."""

GUARD = 1e-4
"""Added to a standard deviation. The papers divide by the plain one; TRL and others add this."""
CISPO_MAX = 5.0
AIPO_MAX = 4.0
DPPO_DIVERGENCE = 0.2
DR_GRPO_LENGTH = 16


def deviation(values: Sequence[float], guard: float = GUARD) -> float:
    """The standard deviation over n − 1. Papers write std and do not say which."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((one - mean) ** 2 for one in values) / (len(values) - 1)) + guard


def standardised(group: Group) -> list[float]:
    """(R − mean) / std within the group: DeepSeekMath, arXiv 2402.03300, section 4.1.2."""
    rewards = [answer.reward for answer in group]
    std = deviation(rewards)
    return [one / std for one in centred(group)]


def centred(group: Group) -> list[float]:
    """R − mean within the group: Dr. GRPO, arXiv 2503.20783, section 3.2."""
    mean = sum(answer.reward for answer in group) / len(group)
    return [answer.reward - mean for answer in group]


def against_others(group: Group) -> list[float]:
    """R minus the mean reward of the other answers: RLOO, arXiv 2402.14740."""
    total, others = sum(answer.reward for answer in group), len(group) - 1
    return [answer.reward - (total - answer.reward) / others for answer in group]


def over_batch(groups: Sequence[Group], guard: float = GUARD) -> list[list[float]]:
    """R − mean within the group, then divided by the standard deviation of these differences over
    the answers of the whole batch: REINFORCE++ with baseline, arXiv 2501.03262. The authors' code
    (OpenRLHF) takes mean and deviation over the tokens of the batch instead, and n for n − 1.
    """
    differences = [centred(group) for group in groups]
    std = deviation([one for group in differences for one in group], guard)
    return [[one / std for one in group] for group in differences]


def overlong_reward(tokens: int, longest: int, buffer: int) -> float:
    """What DAPO adds to the reward of an answer of so many tokens: arXiv 2503.14476, eq. 13."""
    if tokens <= longest - buffer:
        return 0.0
    if tokens <= longest:
        return ((longest - buffer) - tokens) / buffer
    return -1.0


def clipped_term(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 − low, 1 + high) A): PPO, arXiv 1707.06347, eq. 7."""
    bounded = 1 - low if ratio < 1 - low else 1 + high if ratio > 1 + high else ratio
    whole, cut = ratio * advantage, bounded * advantage
    return torch.as_tensor(whole if whole < cut else cut, dtype=torch.float64)


def clipped_tokens(
    answer: Answer, new: Tensor, advantage: float, low: float, high: float
) -> list[Tensor]:
    """The clipped term of each token with its own ratio."""
    terms: list[Tensor] = []
    for logprob, old in zip(new, answer.old, strict=True):
        terms.append(clipped_term(torch.exp(logprob - old), advantage, low, high))
    return terms


def weighted_tokens(
    answer: Answer, new: Tensor, now: Tensor, advantage: float, largest: float
) -> list[Tensor]:
    """min(r, largest) · A · log π of each token, with a weight that has no gradient."""
    terms: list[Tensor] = []
    for logprob, current, old in zip(new, now, answer.old, strict=True):
        weight = min(math.exp(float(current) - old), largest)
        terms.append(weight * advantage * logprob)
    return terms


def total(terms: Sequence[Tensor]) -> Tensor:
    result = torch.zeros((), dtype=torch.float64)
    for term in terms:
        result = result + term
    return result


def mean(terms: Sequence[Tensor]) -> Tensor:
    return total(terms) / len(terms)


def grpo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """DeepSeekMath, arXiv 2402.03300, eq. 3 without KL: 1/G Σ 1/|o| Σ of the clipped terms, and the
    mean over prompts. The paper gives no ε; 0.2 is PPO's.
    """
    prompts: list[Tensor] = []
    for group, policy in zip(groups, new, strict=True):
        answers: list[Tensor] = []
        for answer, logprobs, a in zip(group, policy, standardised(group), strict=True):
            answers.append(mean(clipped_tokens(answer, logprobs, a, 0.2, 0.2)))
        prompts.append(mean(answers))
    return -mean(prompts)


def dr_grpo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """Dr. GRPO, arXiv 2503.20783, section 3.2: 1/G Σ Σ of the clipped terms with A = R − mean. The
    authors' code divides the sum of an answer by a constant length.
    """
    prompts: list[Tensor] = []
    for group, policy in zip(groups, new, strict=True):
        answers: list[Tensor] = []
        for answer, logprobs, a in zip(group, policy, centred(group), strict=True):
            terms = clipped_tokens(answer, logprobs, a, 0.2, 0.2)
            answers.append(total(terms) / DR_GRPO_LENGTH)
        prompts.append(mean(answers))
    return -mean(prompts)


def dapo_terms(groups: Sequence[Group], new: Policy) -> list[list[Tensor]]:
    """The clipped terms of DAPO, with clip-higher, by prompt."""
    prompts: list[list[Tensor]] = []
    for group, policy in zip(groups, new, strict=True):
        terms: list[Tensor] = []
        for answer, logprobs, a in zip(group, policy, standardised(group), strict=True):
            terms += clipped_tokens(answer, logprobs, a, 0.2, 0.28)
        prompts.append(terms)
    return prompts


def dapo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """DAPO, arXiv 2503.14476, eq. 8 as its authors' code (verl, `token-mean`) computes it: the mean
    over all tokens of the update.
    """
    return -mean([term for terms in dapo_terms(groups, new) for term in terms])


def dapo_by_prompt(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """DAPO, arXiv 2503.14476, eq. 8 to the letter: 1/Σ|o| is inside the expectation over prompts,
    so the mean over tokens is of one prompt, and prompts count alike.
    """
    return -mean([mean(terms) for terms in dapo_terms(groups, new)])


def gspo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """GSPO, arXiv 2507.18071, eqs. 5 to 7 and section 5.1: one clipped term an answer, whose ratio
    is (π(y)/μ(y))^(1/|y|).
    """
    prompts: list[Tensor] = []
    for group, policy in zip(groups, new, strict=True):
        answers: list[Tensor] = []
        for answer, logprobs, a in zip(group, policy, standardised(group), strict=True):
            log_ratio = (total(list(logprobs)) - sum(answer.old)) / len(answer.old)
            answers.append(clipped_term(torch.exp(log_ratio), a, 3e-4, 4e-4))
        prompts.append(mean(answers))
    return -mean(prompts)


def cispo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """CISPO, MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5: sg(min(r, bound)) · A · log π, no lower
    bound, the mean over tokens (of the update, as in `dapo`). The paper gives no upper bound.
    """
    terms: list[Tensor] = []
    for group, policy, current in zip(groups, new, now, strict=True):
        given = zip(group, policy, current, standardised(group), strict=True)
        for answer, logprobs, values, a in given:
            terms += weighted_tokens(answer, logprobs, values, a, CISPO_MAX)
    return -mean(terms)


def aipo_sums(groups: Sequence[Group], new: Policy, now: Policy) -> list[Tensor]:
    """Σ over the tokens of each answer of min(π/μ, ρ) · A · log π, with the group's mean as
    baseline.
    """
    answers: list[Tensor] = []
    for group, policy, current in zip(groups, new, now, strict=True):
        for answer, logprobs, values, a in zip(group, policy, current, centred(group), strict=True):
            answers.append(total(weighted_tokens(answer, logprobs, values, a, AIPO_MAX)))
    return answers


def aipo_by_answer(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """AIPO, LlamaRL, arXiv 2505.24034, section 6, to the letter: the sum over the tokens of an
    answer, and the mean over answers.
    """
    return -mean(aipo_sums(groups, new, now))


def aipo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """AIPO over the tokens of the update: the direction of `aipo_by_answer`, shorter by the mean
    length of the answers.
    """
    return -total(aipo_sums(groups, new, now)) / token_count(groups)


def topr(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """TOPR, arXiv 2503.14286, section 3: A · ∇log π(y) of a whole answer, times π(y)/μ(y) bounded
    to [0, 1] where A < 0.
    """
    answers: list[Tensor] = []
    for group, policy, current in zip(groups, new, now, strict=True):
        for answer, logprobs, values, a in zip(group, policy, current, centred(group), strict=True):
            log_ratio = sum(float(value) for value in values) - sum(answer.old)
            weight = 1.0 if a >= 0 else min(math.exp(log_ratio), 1.0)
            answers.append(weight * a * total(list(logprobs)))
    return -mean(answers)


def dppo_mask(now: float, old: float, advantage: float) -> bool:
    """Whether DPPO takes a token out: binary total variation |π − μ| beyond the bound, on the side
    to which the advantage pushes: arXiv 2602.04879, the mask of the binary approximation.
    """
    moved = math.exp(now) - math.exp(old)
    outward = moved > 0 if advantage > 0 else moved < 0
    return abs(moved) > DPPO_DIVERGENCE and outward


def dppo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """DPPO, arXiv 2602.04879: M · r · A of each token, A = R − mean, over the tokens of the update.
    The paper has a sum over the tokens of an answer: the same direction, another length.
    """
    terms: list[Tensor] = []
    for group, policy, current in zip(groups, new, now, strict=True):
        for answer, logprobs, values, a in zip(group, policy, current, centred(group), strict=True):
            for logprob, value, old in zip(logprobs, values, answer.old, strict=True):
                kept = 0.0 if dppo_mask(float(value), old, a) else 1.0
                terms.append(kept * torch.exp(logprob - old) * a)
    return -mean(terms)


def reinforce_pp(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """REINFORCE++ with baseline, arXiv 2501.03262: PPO's clipped terms with `over_batch`, the mean
    over all tokens of the update.
    """
    terms: list[Tensor] = []
    for group, policy, advantages in zip(groups, new, over_batch(groups), strict=True):
        for answer, logprobs, a in zip(group, policy, advantages, strict=True):
            terms += clipped_tokens(answer, logprobs, a, 0.2, 0.2)
    return -mean(terms)


def rloo(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """RLOO, arXiv 2402.14740: 1/k Σ (R − mean of the others) · log π(y), the mean over prompts."""
    prompts: list[Tensor] = []
    for group, policy in zip(groups, new, strict=True):
        answers: list[Tensor] = []
        for logprobs, a in zip(policy, against_others(group), strict=True):
            answers.append(a * total(list(logprobs)))
        prompts.append(mean(answers))
    return -mean(prompts)


def truncated_is(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """PipelineRL, arXiv 2509.19128: min(r, 2) · A · log π, the mean over tokens. The bound and the
    standardised advantage are the trainer's defaults.
    """
    terms: list[Tensor] = []
    for group, policy, current in zip(groups, new, now, strict=True):
        given = zip(group, policy, current, standardised(group), strict=True)
        for answer, logprobs, values, a in given:
            terms += weighted_tokens(answer, logprobs, values, a, 2.0)
    return -mean(terms)


def dual_clip(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
    """`dapo` with a dual clip at 1.5, arXiv 1912.09729: where A < 0 a term is at least 1.5 · A."""
    terms: list[Tensor] = []
    for group, policy in zip(groups, new, strict=True):
        for answer, logprobs, a in zip(group, policy, standardised(group), strict=True):
            for term in clipped_tokens(answer, logprobs, a, 0.2, 0.28):
                floor = torch.tensor(1.5 * a, dtype=torch.float64)
                terms.append(floor if a < 0 and term < floor else term)
    return -mean(terms)


def token_count(groups: Sequence[Group]) -> int:
    return sum(len(answer.old) for group in groups for answer in group)


def loss_and_gradient(
    objective: Objective, groups: Sequence[Group], policy: Policy
) -> tuple[float, Tensor]:
    """The loss, and its gradient with respect to log π of all tokens, in their order."""
    new = [[one.detach().double().requires_grad_() for one in group] for group in policy]
    now = [[one.detach() for one in group] for group in new]
    loss = objective(groups, new, now)
    flat = [one for group in new for one in group]
    gradients = torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), torch.cat(gradients)


def quotients(
    objective: Objective, groups: Sequence[Group], policy: Policy, step: float = 1e-6
) -> Tensor:
    """The same gradient by central differences."""
    now = [[one.detach().double() for one in group] for group in policy]
    new = [[one.clone() for one in group] for group in now]
    found: list[float] = []
    for logprobs in (one for group in new for one in group):
        for i in range(len(logprobs)):
            at = float(logprobs[i])
            logprobs[i] = at + step
            above = float(objective(groups, new, now))
            logprobs[i] = at - step
            below = float(objective(groups, new, now))
            logprobs[i] = at
            found.append((above - below) / (2 * step))
    return torch.tensor(found, dtype=torch.float64)
