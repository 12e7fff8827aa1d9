"""The rank of an answer among those to the same prompt: the number of its pass, plus a priority in
[0, 1] from its reward. An answer of a later pass ranks first, then the one with the higher reward.

Rewards may come late, so the places of answers without one are kept by name, to rank them again.
"""

from collections import OrderedDict
from dataclasses import dataclass

UNREWARDED_PRIORITY = 0.5  # priority of an answer without a reward
RUNNING_PRIORITY = 0.0  # of a running sequence: every finished answer of the same pass ranks higher
PASS_BYTES = 200  # about: a prompt's entry in the dictionary of passes
UNREWARDED_BYTES = 400  # about: the entry of an answer without a reward


def reward_priority(reward: float | None) -> float:
    """A priority in [0, 1] that rises with the reward, whatever its scale; without one,
    `UNREWARDED_PRIORITY`.
    """
    return UNREWARDED_PRIORITY if reward is None else 0.5 + 0.5 * reward / (1 + abs(reward))


class PromptPasses:
    """The number of passes over each prompt, for the `most` prompts used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def number(self, prompt: int, group: int) -> int:
        """The pass of this group; a group later than all earlier ones of the prompt begins the next
        pass.
        """
        newest, count = self._known.get(prompt, (-1, 0))
        if group > newest:
            newest, count = group, count + 1
        self._known[prompt] = (newest, count)
        self._known.move_to_end(prompt)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return count


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer in the ring: `count` tokens from place `base`; its patterns end at `first` and
    later.
    """

    prompt: int
    number: int
    base: int
    count: int
    first: int


class UnrewardedAnswers:
    """The `most` answers without a reward that were stored last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, StoredAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, name: str, stored: StoredAnswer) -> None:
        self._stored[name] = stored
        self._stored.move_to_end(name)
        while len(self._stored) > self._most:
            self._stored.popitem(last=False)

    def take(self, name: str) -> StoredAnswer | None:
        """Remove and return an answer; None if it is unknown or was evicted."""
        return self._stored.pop(name, None)
