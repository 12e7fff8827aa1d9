"""The published objectives with a further policy, a reference or a proximal one, written again from
their papers in float64 as those in `reference.py`; and all objectives by name. Import it as
`testbed.objectives.further_policies` everywhere.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from testbed.objectives.reference import (
    Answer,
    Group,
    Objective,
    Policy,
    aipo,
    aipo_by_answer,
    cispo,
    clipped_term,
    dapo,
    dapo_by_prompt,
    dppo,
    dr_grpo,
    dual_clip,
    grpo,
    gspo,
    mean,
    reinforce_pp,
    rloo,
    standardised,
    topr,
    truncated_is,
)

KL_WEIGHT = 0.04
"""β of DeepSeekMath, arXiv 2402.03300, section 4.2."""
WEIGHT_MAX = 5.0
"""Bound of the weight proximal/behaviour in the examples of AReaL, which leave out tokens above."""


def kl_estimate(form: str, logprob: Tensor, reference: float) -> Tensor:
    """The estimates k1, k2 and k3 of KL(π ‖ reference) from a token of π, with x = reference/π:
    −log x, (log x)²/2 and x − 1 − log x (Schulman, "Approximating KL divergence", 2020).
    """
    x = torch.exp(reference - logprob)
    return {"k1": -torch.log(x), "k2": torch.log(x) ** 2 / 2, "k3": x - 1 - torch.log(x)}[form]


def grpo_with_kl(form: str) -> Objective:
    """DeepSeekMath, arXiv 2402.03300, eq. 3 with its KL term: eq. 4 is k3, the estimate of each
    token, weighted by β and averaged like the clipped terms.
    """

    def loss(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
        prompts: list[Tensor] = []
        for group, policy in zip(groups, new, strict=True):
            answers: list[Tensor] = []
            for answer, logprobs in zip(group, policy, strict=True):
                pairs = zip(logprobs, answer.reference, strict=True)
                answers.append(mean([kl_estimate(form, one, given) for one, given in pairs]))
            prompts.append(mean(answers))
        return grpo(groups, new, now) + KL_WEIGHT * mean(prompts)

    return loss


def kl_in_reward(form: str) -> Objective:
    """REINFORCE++, arXiv 2501.03262: a token's advantage is the answer's minus β times the sum of
    KL(i) over it and all later tokens i, KL(i) = log μ/reference (`k1`; or the other estimates) of
    the policy that drew the answer. Here with the advantage and the clipped terms of GRPO.
    """

    def loss(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
        prompts: list[Tensor] = []
        for group, policy in zip(groups, new, strict=True):
            answers: list[Tensor] = []
            for answer, logprobs, a in zip(group, policy, standardised(group), strict=True):
                terms: list[Tensor] = []
                for t, logprob in enumerate(logprobs):
                    shaped = a - KL_WEIGHT * _kl_from(form, answer, t)
                    ratio = torch.exp(logprob - answer.old[t])
                    terms.append(clipped_term(ratio, shaped, 0.2, 0.2))
                answers.append(mean(terms))
            prompts.append(mean(answers))
        return -mean(prompts)

    return loss


@cache  # quotients ask for it thousands of times, and it does not depend on the policy
def _kl_from(form: str, answer: Answer, first: int) -> float:
    total = 0.0
    for old, reference in zip(answer.old[first:], answer.reference[first:], strict=True):
        total += float(kl_estimate(form, torch.tensor(old, dtype=torch.float64), reference))
    return total


def decoupled(largest: float) -> Objective:
    """Decoupled PPO, AReaL, arXiv 2505.24298, eq. 5: proximal/μ · min(u A, clip(u) A) of each token
    with u = π/proximal, the mean over the tokens of the update (the authors' code). The paper does
    not bound the weight proximal/μ: `largest` is infinite there.
    """

    def loss(groups: Sequence[Group], new: Policy, now: Policy) -> Tensor:
        terms: list[Tensor] = []
        for group, policy in zip(groups, new, strict=True):
            for answer, logprobs, a in zip(group, policy, standardised(group), strict=True):
                given = zip(logprobs, answer.old, answer.proximal, strict=True)
                for logprob, old, proximal in given:
                    weight = min(math.exp(proximal - old), largest)
                    u = torch.exp(logprob - proximal)
                    terms.append(weight * clipped_term(u, a, 0.2, 0.2))
        return -mean(terms)

    return loss


OBJECTIVES: Mapping[str, Objective] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "aipo": aipo,
    "topr": topr,
    "dppo": dppo,
    "decoupled_ppo": decoupled(WEIGHT_MAX),
    "reinforce_pp": reinforce_pp,
    "rloo": rloo,
}
"""Preset → its loss."""

OTHER_OBJECTIVES: Mapping[str, Objective] = {
    "truncated_is": truncated_is,
    "ppo_clip": dapo,
    "dual_clip": dual_clip,
    "dapo_by_prompt": dapo_by_prompt,
    "aipo_by_answer": aipo_by_answer,
    "decoupled_unbounded": decoupled(math.inf),
    **{f"grpo_{form}": grpo_with_kl(form) for form in ("k1", "k2", "k3")},
    **{f"grpo_{form}_in_reward": kl_in_reward(form) for form in ("k1", "k2", "k3")},
}
"""Other settings of the trainer that a paper has → their loss."""
