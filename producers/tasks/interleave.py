"""Which part of a mixture asks at a position: exact weights over a cycle, spread as evenly as can
be. Pure.

Smooth weighted round robin (as nginx balances servers): at each place every part earns its weight,
the richest asks and pays the total. Over one cycle each part asks exactly its weight's share, and
any stretch of the order is off by a prompt or so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from streams.errors import ConfigurationError

CYCLE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Turn:
    """Part number `part` asks for the `place`-th time."""

    part: int
    place: int


class Cycle:
    """The endless order of the parts."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = _whole(weights)
        self._order = _order(self._shares)

    def __len__(self) -> int:
        """Places until the order repeats."""
        return len(self._order)

    def at(self, position: int) -> Turn:
        """A function of the position alone."""
        cycle, place = divmod(position, len(self._order))
        part, rank = self._order[place]
        return Turn(part, cycle * self._shares[part] + rank)


def _whole(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the same proportion."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(one.denominator for one in exact))
    shares = [int(one * scale) for one in exact]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) > CYCLE_MAX:
        raise ConfigurationError(
            f"task.parts: weights {', '.join(f'{w:g}' for w in weights)} repeat after "
            f"{sum(shares)} prompts, at most {CYCLE_MAX}; give rounder ones"
        )
    return shares


def _order(shares: Sequence[int]) -> list[tuple[int, int]]:
    """One cycle: part, and how often it asked before in this cycle."""
    total = sum(shares)
    earned, asked = [0] * len(shares), [0] * len(shares)
    order: list[tuple[int, int]] = []
    for _ in range(total):
        earned = [have + share for have, share in zip(earned, shares, strict=True)]
        part = max(range(len(shares)), key=lambda number: (earned[number], -number))
        earned[part] -= total
        order.append((part, asked[part]))
        asked[part] += 1
    return order
