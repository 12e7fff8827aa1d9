"""Which part of a mixture gives the prompt at a position: exact weights over a cycle, spread
evenly. Pure.

Smooth weighted round robin (nginx's load balancing): at each place every part gains its weight, and
the part with the most weight gives the prompt and pays the total. Over one cycle each part gives
exactly its weight's share of prompts; any section of the order deviates by about one prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from rollstream.errors import ConfigurationError

CYCLE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class PartPosition:
    """The prompt comes from part number `part`, at position `place` of that part's own order."""

    part: int
    place: int


class MixtureCycle:
    """The endless order of the parts."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = _whole_weights(weights)
        self._order = _order(self._shares)

    def __len__(self) -> int:
        """Number of places until the order repeats."""
        return len(self._order)

    def at(self, position: int) -> PartPosition:
        """A function of the position alone."""
        cycle, place = divmod(position, len(self._order))
        part, rank = self._order[place]
        return PartPosition(part, cycle * self._shares[part] + rank)


def _whole_weights(weights: Sequence[float]) -> list[int]:
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
    """One cycle: part, and how many prompts it gave before in this cycle."""
    total = sum(shares)
    credit, given = [0] * len(shares), [0] * len(shares)
    order: list[tuple[int, int]] = []
    for _ in range(total):
        credit = [credit_of + share for credit_of, share in zip(credit, shares, strict=True)]
        part = max(range(len(shares)), key=lambda number: (credit[number], -number))
        credit[part] -= total
        order.append((part, given[part]))
        given[part] += 1
    return order
