"""PPO with a critic, written again from its papers in float64 loops as the objectives in
`reference.py`; nothing here comes from the trainer. Import it as
`testbed.objectives.critic_reference` everywhere.

An episode has tokens of several turns, rewards at some of them, and tokens that are not trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from testbed.objectives.further_policies import KL_WEIGHT, kl_estimate
from testbed.objectives.reference import clipped_term, mean


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode, with an entry per generated token: log μ, log of the reference policy, the value
    that the critic had, the reward that followed, the number of its turn, and whether it is
    trained.
    """

    old: tuple[float, ...]
    reference: tuple[float, ...]
    value: tuple[float, ...]
    reward: tuple[float, ...]
    turn: tuple[int, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class CriticForm:
    """The constants of a critic's loss; `clip` is infinite without value clipping, `kl` is the
    weight of the k1 estimates in the rewards.
    """

    by_turn: bool = False
    gamma: float = 1.0
    lambda_: float = 0.95
    clip: float = 0.2
    kl: float = 0.0


FORMS: Mapping[str, CriticForm] = {
    "ppo": CriticForm(),
    "ppo_discounted": CriticForm(gamma=0.9, lambda_=0.7),
    "ppo_by_turn": CriticForm(by_turn=True, gamma=0.95),
    "ppo_unclipped_values": CriticForm(clip=float("inf")),
    "ppo_kl_in_reward": CriticForm(kl=KL_WEIGHT),
}
"""The preset, and other settings of its critic."""


def actions_of(episode: Episode, form: CriticForm) -> list[tuple[list[int], float]]:
    """The actions of an episode, each with its trained tokens and its reward. A token that is not
    trained is none, and its reward is that of the trained one before it.
    """
    found: list[tuple[list[int], float]] = []
    turn = -1
    for t, is_trained in enumerate(episode.trained):
        reward = episode.reward[t]
        if is_trained:
            old = torch.tensor(episode.old[t], dtype=torch.float64)
            reward -= form.kl * float(kl_estimate("k1", old, episode.reference[t]))
            if not form.by_turn or episode.turn[t] != turn:
                found.append(([], 0.0))
            turn = episode.turn[t]
            found[-1][0].append(t)
        if found:
            found[-1] = found[-1][0], found[-1][1] + reward
    return found


def advantages_of(
    actions: Sequence[tuple[list[int], float]], episode: Episode, form: CriticForm
) -> list[float]:
    """A_t = Σ_n (γλ)^n δ_(t+n), δ_t = r_t + γ V(s_(t+1)) − V(s_t): GAE, arXiv 1506.02438, eqs. 10
    and 16. V is 0 after the last action; s_t is what precedes the first token of the action.
    """
    values = [episode.value[tokens[0]] for tokens, _ in actions] + [0.0]
    deltas = [
        reward + form.gamma * values[k + 1] - values[k] for k, (_, reward) in enumerate(actions)
    ]
    return [
        sum((form.gamma * form.lambda_) ** n * deltas[k + n] for n in range(len(actions) - k))
        for k in range(len(actions))
    ]


def ppo_loss(
    episodes: Sequence[Episode],
    logprobs: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
    form: CriticForm,
) -> Tensor:
    """PPO, arXiv 1707.06347, eq. 9 without its entropy: −L^CLIP + L^VF, the means over all trained
    tokens. L^VF is ½ max((V − R)², (clip(V, V_old ± ε) − R)²) with R = A + V_old, as the authors'
    code (baselines, ppo2/model.py) has it; V is that before the token's action.
    """
    policy: list[Tensor] = []
    errors: list[Tensor] = []
    for episode, new, now in zip(episodes, logprobs, values, strict=True):
        actions = actions_of(episode, form)
        for (tokens, _), a in zip(actions, advantages_of(actions, episode, form), strict=True):
            before = episode.value[tokens[0]]
            value, target = now[tokens[0]], a + before
            moved = torch.clamp(value, before - form.clip, before + form.clip)
            squares = (value - target) ** 2, (moved - target) ** 2
            for t in tokens:
                policy.append(clipped_term(torch.exp(new[t] - episode.old[t]), a, 0.2, 0.2))
                errors.append((squares[0] if squares[0] > squares[1] else squares[1]) / 2)
    return -mean(policy) + mean(errors)
