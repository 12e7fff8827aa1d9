"""The critic's advantages and value loss against a second restatement in float64, written from the
papers alone, neither from the trainer nor from `testbed/objectives/critic_reference.py`:

* GAE as the sum that defines it, arXiv 1506.02438, eqs. 11, 12 and 16, not as a recursion;
* the squared error of PPO, arXiv 1707.06347, eq. 9, clipped as in arXiv 2005.12729, section 3;
* gradients as quotients of differences.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollstream.consumers.credit import PartRewards
from rollstream.consumers.objectives.critic.gae import gae, judge, value_losses
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.row_layout import loss_inputs
from tests.trainer.learning_reference import sample, settings

STEP = 1e-6


def discounted_residuals(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lambda_: float
) -> list[float]:
    """Eq. 16: the advantage of step t is the sum over l of (γλ)^l times the temporal difference
    residual of step t + l; an episode that has ended has the value 0.
    """
    steps = len(rewards)
    following = [*values[1:], 0.0]
    residuals = [rewards[t] + gamma * following[t] - values[t] for t in range(steps)]
    return [
        sum((gamma * lambda_) ** later * residuals[t + later] for later in range(steps - t))
        for t in range(steps)
    ]


def clipped_error(value: float, before: float, target: float, epsilon: float | None) -> float:
    plain = (value - target) ** 2
    if epsilon is None:
        return plain / 2
    bounded = min(max(value, before - epsilon), before + epsilon)
    return max(plain, (bounded - target) ** 2) / 2


def slopes(f: Callable[[list[float]], float], at: Sequence[float]) -> list[float]:
    """The gradient of `f` by central differences."""
    found: list[float] = []
    for index in range(len(at)):
        up, down = list(at), list(at)
        up[index] += STEP
        down[index] -= STEP
        found.append((f(up) - f(down)) / (2 * STEP))
    return found


def relative(found: np.ndarray, wanted: Sequence[float]) -> float:
    expected = np.asarray(wanted)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_are_the_sum_of_discounted_residuals(gamma: float, lambda_: float):
    rng = np.random.default_rng(11)
    lengths = (1, 2, 13, 40)
    rewards, values = (rng.normal(size=sum(lengths)) for _ in range(2))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    advantages, returns = gae(values, rewards, sequence, gamma, lambda_)
    wanted: list[float] = []
    for one in range(len(lengths)):
        mine = sequence == one
        wanted += discounted_residuals(
            rewards[mine].tolist(), values[mine].tolist(), gamma, lambda_
        )
    assert relative(advantages, wanted) < 1e-12
    assert relative(returns, (np.asarray(wanted) + values).tolist()) < 1e-12


@pytest.mark.parametrize("epsilon", [None, 0.2])
def test_the_value_loss_and_its_gradient_are_those_of_the_papers(epsilon: float | None):
    rng = np.random.default_rng(12)
    before, target = rng.normal(size=64), rng.normal(size=64)
    now = before + rng.normal(scale=0.3, size=64)
    values = torch.from_numpy(now.copy()).requires_grad_()
    losses = value_losses(values, torch.from_numpy(before), torch.from_numpy(target), epsilon)
    wanted = [clipped_error(*one, epsilon) for one in zip(now, before, target, strict=True)]
    assert relative(losses.detach().numpy(), wanted) < 1e-12
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    numeric = slopes(
        lambda v: sum(clipped_error(*one, epsilon) for one in zip(v, before, target, strict=True)),
        now.tolist(),
    )
    assert relative(gradient.numpy(), numeric) < 1e-8
    if epsilon is not None:
        held = [g == 0 for g in numeric]
        assert any(held), "a value that is bounded on the far side of its target has no gradient"
        assert not all(held)


def rewarded_episodes() -> list[Sample]:
    """Episodes of two to four turns, some of their tokens not trained, each turn rewarded."""
    rng = np.random.default_rng(13)
    made: list[Sample] = []
    for index in range(5):
        one = sample(rng, str(index), turn_count=2 + index % 3)
        assert one.turn_ends is not None
        ends = np.unique(one.turn_ends)
        parts = PartRewards(len(one.mask), ends, rng.normal(size=len(ends)))
        made.append(replace(one, parts=parts))
    return made


def actions(one: Sample, by_turn: bool) -> tuple[list[list[int]], list[float]]:
    """The trained tokens of each action, and its rewards: those at its own tokens and at the
    untrained ones behind it, up to the next action.
    """
    assert one.turn_ends is not None
    assert one.parts is not None
    reward_at = dict(zip(one.parts.ends.tolist(), one.parts.rewards.tolist(), strict=True))
    tokens: list[list[int]] = []
    rewards: list[float] = []
    last_turn = -1
    for token, is_trained in enumerate(one.mask):
        turn = sum(end < token for end in one.turn_ends)
        if is_trained:
            if not tokens or not by_turn or turn != last_turn:
                tokens.append([])
                rewards.append(0.0)
                last_turn = turn
            tokens[-1].append(token)
        if rewards:
            rewards[-1] += reward_at.get(token, 0.0)
    return tokens, rewards


@pytest.mark.parametrize("action", ["token", "turn"])
def test_what_a_micro_batch_is_judged_is_restated(action: str):
    """From samples to the advantage of each token, and the gradient of the summed value loss."""
    samples = rewarded_episodes()
    chosen = settings(
        advantage="gae", loss="ppo_clip", aggregate="token",
        critic={"action": action, "gamma": 0.97, "gae_lambda": 0.9, "clip": 0.2},
    )  # fmt: skip
    rng = np.random.default_rng(14)
    count = sum(int(one.mask.sum()) for one in samples)
    before = rng.normal(size=count)
    now = before + rng.normal(scale=0.3, size=count)
    values = torch.from_numpy(now.copy()).requires_grad_()
    judged = judge(values, before, samples, loss_inputs(samples, 5), None, chosen)
    (gradient,) = torch.autograd.grad(judged.loss, values)

    wanted = [0.0] * count
    summands: list[tuple[int, int, float]] = []  # place of an action's value, its tokens, target
    first = 0
    for one in samples:
        places = {int(token): first + at for at, token in enumerate(np.flatnonzero(one.mask))}
        tokens, rewards = actions(one, action == "turn")
        heads = [places[group[0]] for group in tokens]
        old = [float(before[place]) for place in heads]
        advantages = discounted_residuals(rewards, old, 0.97, 0.9)
        for group, place, value, advantage in zip(tokens, heads, old, advantages, strict=True):
            for token in group:
                wanted[places[token]] = advantage
            summands.append((place, len(group), value + advantage))
        first += len(places)

    def loss(v: Sequence[float]) -> float:
        return sum(
            tokens * clipped_error(v[place], float(before[place]), target, 0.2)
            for place, tokens, target in summands
        )

    assert relative(judged.advantages.double().numpy(), wanted) < 1e-6
    assert float(judged.loss.detach()) == pytest.approx(loss(now.tolist()), rel=1e-6)
    assert relative(gradient.double().numpy(), slopes(loss, now.tolist())) < 1e-6
