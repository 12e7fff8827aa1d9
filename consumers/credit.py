"""Rewards per turn or generated token, and from them an advantage for each token (process
supervision, DeepSeekMath, arXiv 2402.03300, section 4.1.3). Pure.

Names of a critic (`GAE`) and of a reference of scorers are here too, since this module loads no
settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.streams.records import GENERATED, Trajectory

GAE = "gae"
"""`trainer.advantage` of a run that trains a critic."""

Rewards = NDArray[np.float64]


class ReferenceSettings(Protocol):
    @property
    def reference_kl(self) -> float: ...
    @property
    def reference_by(self) -> str: ...
    @property
    def reference(self) -> str: ...


def scored_reference(settings: ReferenceSettings) -> str:
    """The reference whose log-probabilities scorers compute; "" if there is none, or the trainer
    computes them itself.
    """
    is_scored = settings.reference_kl and settings.reference_by == "score"
    return settings.reference if is_scored else ""


@dataclass(frozen=True, slots=True, eq=False)
class PartRewards:
    """`ends` [parts], ascending, are the indices of the parts' last tokens among the trajectory's
    `tokens` generated tokens.
    """

    tokens: int
    ends: NDArray[np.intp]
    rewards: Rewards

    @property
    def total(self) -> float:
        return float(self.rewards.sum())

    def plus(self, other: "PartRewards", weight: float = 1.0) -> "PartRewards":
        """The sum with `weight` times another term; parts with the same end become one."""
        ends = np.union1d(self.ends, other.ends)
        rewards = np.zeros(len(ends))
        rewards[np.searchsorted(ends, self.ends)] += self.rewards
        rewards[np.searchsorted(ends, other.ends)] += weight * other.rewards
        return PartRewards(self.tokens, ends, rewards)


def no_parts(tokens: int) -> PartRewards:
    return PartRewards(tokens, np.zeros(0, np.intp), np.zeros(0))


def whole_reward(tokens: int, reward: float) -> PartRewards:
    return PartRewards(tokens, np.array([tokens - 1]), np.array([reward], np.float64))


def part_rewards(record: Trajectory, values: Sequence[float]) -> PartRewards | str:
    """One value counts at the last token, one for each turn at the turn's last token, one for each
    generated token at that token. For any other number returns the reason why there is no reward.
    """
    tokens = len(record.logprobs)
    numbers = np.asarray(values, np.float64)
    if len(numbers) == 1:
        return whole_reward(tokens, float(numbers[0]))
    turns = turn_ends(record)
    if len(numbers) == len(turns):
        ends, at = np.unique(turns, return_inverse=True)
        rewards = np.zeros(len(ends))
        np.add.at(rewards, at, numbers)
        return PartRewards(tokens, ends, rewards)
    if len(numbers) == tokens:
        return PartRewards(tokens, np.arange(tokens), numbers)
    return f"{len(numbers)} values for {len(turns)} turns and {tokens} generated tokens"


def turn_ends(record: Trajectory) -> NDArray[np.intp]:
    """The index, among the generated tokens, of each turn's last; a turn that generated nothing
    ends with the one before it.
    """
    is_generated = record.sources == GENERATED
    before = np.cumsum(is_generated)
    if record.turns:
        ends = np.array([turn.end for turn in record.turns], np.intp)
    # Without recorded turns: the runs of generated tokens between those of the environment.
    else:
        ends = np.flatnonzero(is_generated & ~np.append(is_generated[1:], False)) + 1
    return np.maximum(before[ends - 1] - 1, 0)


def token_advantages(parts: Sequence[PartRewards], each: Rewards) -> list[Rewards]:
    """A token's advantage is the sum of those of the parts that end at or after it. `each` has the
    advantages of all parts, trajectory after trajectory.
    """
    advantages: list[Rewards] = []
    first = 0
    for part in parts:
        at_ends = np.zeros(part.tokens)
        at_ends[part.ends] = each[first : first + len(part.ends)]
        advantages.append(np.cumsum(at_ends[::-1])[::-1])
        first += len(part.ends)
    return advantages
