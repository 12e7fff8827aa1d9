"""Advantages over a critic's values and the loss of the values. Pure; docs/explanation/learning.md
has the formulas and sources.

The steps of GAE are actions: trained tokens, or turns that have one. Other tokens have no value,
and their reward belongs to the action before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.objectives.loss import aggregated
from rollstream.consumers.objectives.losses.base import LossInputs
from rollstream.consumers.trainer.data.sample import Sample

Floats64 = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """K actions of G trained tokens: `of_token` [G] is the action of each token; `first` [K] the
    first token of each action, `sequence` [K] the index of its sequence, `rewards` [K] its reward.
    """

    of_token: Indices
    first: Indices
    sequence: Indices
    rewards: Floats64

    def less(self, penalties: Tensor | None) -> Floats64:
        if penalties is None:
            return self.rewards
        lost = penalties.detach().double().cpu().numpy()
        return self.rewards - np.bincount(self.of_token, lost, len(self.first))


def actions_of(samples: Sequence[Sample], by_turn: bool) -> Actions:
    """Returns the actions of samples with `parts` and `turn_ends`: turns with `by_turn`, else
    tokens.
    """
    of_token, first, owner = list[Indices](), list[Indices](), list[Indices]()
    rewards = list[Floats64]()
    tokens = actions = 0
    for number, sample in enumerate(s for s in samples if s.mask.any()):
        begins, token_rewards = _sample_actions(sample, by_turn)
        within = np.cumsum(begins) - 1
        count = int(within[-1]) + 1
        first.append(np.flatnonzero(begins) + tokens)
        of_token.append(within + actions)
        owner.append(np.full(count, number))
        sums = np.zeros(count)
        np.add.at(sums, within, token_rewards)
        rewards.append(sums)
        tokens, actions = tokens + len(begins), actions + count
    return Actions(
        np.concatenate(of_token), np.concatenate(first), np.concatenate(owner),
        np.concatenate(rewards),
    )  # fmt: skip


def _sample_actions(sample: Sample, by_turn: bool) -> tuple[NDArray[np.bool_], Floats64]:
    assert sample.parts is not None
    assert sample.turn_ends is not None
    trained = np.flatnonzero(sample.mask)
    rewards = np.zeros(len(trained))
    # A token that is not trained gives its reward to the last trained one before it, or to none.
    place = np.searchsorted(trained, sample.parts.ends, side="right") - 1
    np.add.at(rewards, place[place >= 0], sample.parts.rewards[place >= 0])
    if not by_turn:
        return np.ones(len(trained), np.bool_), rewards
    turn = np.searchsorted(sample.turn_ends, trained)
    return np.diff(turn, prepend=-1) != 0, rewards


def gae(
    values: Floats64, rewards: Floats64, sequence: Indices, gamma: float, lambda_: float
) -> tuple[Floats64, Floats64]:
    """Advantages [K] and returns [K], the targets of the values: A(k) = δ(k) + γλ A(k + 1) with
    δ(k) = r(k) + γ V(k + 1) − V(k), and A(k) + V(k) (Schulman et al., arXiv 1506.02438, eq. 16).
    After the last action of a sequence both are 0; `sequence` ascends.
    """
    counts = np.bincount(sequence)
    longest = int(counts.max())
    # Right-aligned, so that all sequences end in the same column.
    column = longest - counts[sequence] + np.arange(len(sequence)) - _begins(counts)[sequence]
    value, reward, advantage = (np.zeros((len(counts), longest + 1)) for _ in range(3))
    value[sequence, column], reward[sequence, column] = values, rewards
    for k in range(longest - 1, -1, -1):
        delta = reward[:, k] + gamma * value[:, k + 1] - value[:, k]
        advantage[:, k] = delta + gamma * lambda_ * advantage[:, k + 1]
    by_action = advantage[sequence, column]
    return by_action, by_action + values


def _begins(counts: Indices) -> Indices:
    return np.cumsum(counts) - counts


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Returns ½ max((V − R)², (V' − R)²) of each action [K] with V' = V_old + clip(V − V_old, ±ε):
    the squared error of PPO (arXiv 1707.06347, eq. 9) with its authors' value clipping (OpenAI
    baselines, `ppo2`; arXiv 2005.12729, section 3).
    """
    losses = (values - returns).square()
    if clip is not None:
        bounded = old + (values - old).clamp(-clip, clip)
        losses = torch.maximum(losses, (bounded - returns).square())
    return losses / 2


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Sums over actions: `error` is the return less the value that made the advantage, `clipped`
    counts values that moved beyond the clipping.
    """

    actions: float = 0.0
    loss: float = 0.0
    value: float = 0.0
    returned: float = 0.0
    returned_squared: float = 0.0
    error: float = 0.0
    error_squared: float = 0.0
    clipped: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Returns means per action. `explained_variance` is 1 − Var(error) / Var(return): 1 for
        exact values, 0 for a constant; missing where the returns are equal.
        """
        count = max(self.actions, 1.0)
        spread = self.returned_squared / count - (self.returned / count) ** 2
        unexplained = self.error_squared / count - (self.error / count) ** 2
        explained = {"explained_variance": 1 - unexplained / spread} if spread > 1e-12 else {}
        return {
            "value_loss": self.loss / count,
            "value_mean": self.value / count,
            "return_mean": self.returned / count,
            "value_clipped": self.clipped / count,
            **explained,
        }


def _statistics(
    losses: Tensor, values: Tensor, old: Floats64, returns: Floats64, clip: float | None
) -> ValueStatistics:
    moved = np.abs(values.detach().double().cpu().numpy() - old)
    error = returns - old
    return ValueStatistics(
        float(len(old)),
        float(losses.detach().double().sum()),
        float(old.sum()),
        float(returns.sum()),
        float(np.square(returns).sum()),
        float(error.sum()),
        float(np.square(error).sum()),
        float(np.count_nonzero(moved > clip)) if clip is not None else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """`advantages` [G] of the trained tokens, the loss of the values as a sum, weighted and divided
    like the policy's, and statistics.
    """

    advantages: Tensor
    loss: Tensor
    statistics: ValueStatistics


def judge(
    values: Tensor,
    old: Floats64,
    samples: Sequence[Sample],
    inputs: LossInputs,
    penalties: Tensor | None,
    settings: ObjectiveSettings,
) -> Judgement:
    """`old` [G] are the values that make the advantages, around which the loss is clipped;
    `penalties` [G] are subtracted from the rewards.
    """
    critic = settings.critic
    actions = actions_of(samples, critic.action == "turn")
    first = torch.from_numpy(actions.first)  # pyright: ignore[reportUnknownMemberType]
    # The value of an action is that of its first token.
    chosen = values.index_select(0, first.to(values.device))
    before = old[actions.first]
    rewards = actions.less(penalties)
    advantages, returns = gae(before, rewards, actions.sequence, critic.gamma, critic.gae_lambda)

    def tensor(numbers: Floats64) -> Tensor:
        on_host = torch.from_numpy(numbers.astype(np.float32))  # pyright: ignore[reportUnknownMemberType]
        return on_host.to(values.device)

    losses = value_losses(chosen, tensor(before), tensor(returns), critic.clip)
    of_token = torch.from_numpy(actions.of_token)  # pyright: ignore[reportUnknownMemberType]
    # All its tokens have its loss, so an error counts as often as it is used.
    by_token = losses.index_select(0, of_token.to(values.device))
    return Judgement(
        tensor(advantages[actions.of_token]),
        aggregated(by_token, inputs, settings)[0].sum(),
        _statistics(losses, chosen, before, returns, critic.clip),
    )
