"""What an answer is worth against others to the same prompt: the number of its pass, and in [0, 1]
its reward. What is newer than a pass wins, then what earned more.

Rewards may come late, so answers without one are remembered by name: where they lie, to be ranked
again.
"""

from collections import OrderedDict
from dataclasses import dataclass

UNKNOWN = 0.5  # priority of what has no reward yet
RUNNING = 0.0  # and of what still runs: anything finished in the same pass comes first
PASS_BYTES = 200  # a prompt's entry in the dictionary of passes, about
WAITING_BYTES = 400  # an answer's that has no reward yet


def priority_of(reward: float | None) -> float:
    """In [0, 1], rising with the reward, whatever its scale; what is unjudged lies between."""
    return UNKNOWN if reward is None else 0.5 + 0.5 * reward / (1 + abs(reward))


class Passes:
    """How often each prompt came round, of the `most` heard of last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def number(self, prompt: int, group: int) -> int:
        """The pass that this group belongs to; one later than any seen begins the next."""
        newest, count = self._known.get(prompt, (-1, 0))
        if group > newest:
            newest, count = group, count + 1
        self._known[prompt] = (newest, count)
        self._known.move_to_end(prompt)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return count


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer in the ring: `count` tokens from place `base`; patterns end at `first` and
    later.
    """

    prompt: int
    number: int
    base: int
    count: int
    first: int


class Waiting:
    """Answers without a reward, the `most` that were stored last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, name: str, stored: Stored) -> None:
        self._stored[name] = stored
        self._stored.move_to_end(name)
        while len(self._stored) > self._most:
            self._stored.popitem(last=False)

    def take(self, name: str) -> Stored | None:
        """It waits no longer; None if it never did, or was forgotten."""
        return self._stored.pop(name, None)
