"""How long drafts should be, and whether any pay: tokens per second of the whole batch, maximised.

A pass over n tokens takes `fixed_s + token_s · n` (`StepTimes` fits that from measured passes). A
draft gains for each of its tokens the chance that it and all before it are right: a + a² + … + a^d
where one rate a is all that is known, else a product along `Odds`. The next token is worth its time
while its own gain is above what the batch makes per second: Seer's marginal benefit (section 3.7),
solved by Dinkelbach's iteration (Management Science 13, 1967) for the ratio. Pure functions over
values.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

FORGET = 0.98  # weight of a measurement after the next one: about the last 50 count
OUTLIER = 4.0  # a pass that took so many times what was expected was interrupted
CERTAIN = 0.999  # no rate is believed to be higher
PADDING = 0.5  # of a token's time: attention over a place that a shorter draft leaves empty


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a pass, and of each token in it."""

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Weighted sums over measured passes, newer ones more: what a straight line is fitted from."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def seen(self, tokens: float, seconds: float) -> "StepTimes":
        """With one pass more; what an interruption took beyond `OUTLIER` is left out."""
        if self.count >= 3:
            seconds = min(seconds, OUTLIER * self.cost().seconds(tokens))
        return StepTimes(
            self.count * FORGET + 1,
            self.tokens * FORGET + tokens,
            self.seconds * FORGET + seconds,
            self.tokens_squared * FORGET + tokens * tokens,
            self.product * FORGET + tokens * seconds,
        )

    def times(self, factor: float) -> "StepTimes":
        """As if each pass had taken so many times longer."""
        return replace(self, seconds=self.seconds * factor, product=self.product * factor)

    def cost(self) -> StepCost:
        """The line through what was seen; all of it fixed where every pass had as many tokens.

        Neither part is negative: a steeper line than through the origin is that one, a falling one
        is flat.
        """
        if not self.count:
            return StepCost(0.0, 0.0)
        mean, level = self.tokens / self.count, self.seconds / self.count
        spread = self.tokens_squared / self.count - mean * mean
        if spread < 0.01 * mean * mean or mean <= 0:
            return StepCost(level, 0.0)
        slope = (self.product / self.count - mean * level) / spread
        slope = min(max(slope, 0.0), level / mean)
        return StepCost(level - slope * mean, slope)


@dataclass(frozen=True, slots=True)
class Odds:
    """Of a draft, by its length d: the chance that all of it is right, as a negative number
    (`whole[d - 1]`, so that it rises), and the tokens that it is expected to gain (`gains[d]`).
    """

    whole: tuple[float, ...]
    gains: tuple[float, ...]

    @classmethod
    def of(cls, chances: Iterable[float]) -> "Odds":
        """From each token's chance while those before it are right."""
        whole: list[float] = []
        product = 1.0
        for chance in chances:
            product *= min(chance, CERTAIN)
            whole.append(product)
        return cls(tuple(-one for one in whole), tuple(accumulate(whole, initial=0.0)))


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of the batch: at most `window` tokens are guessed; each is right with `rate`, or
    with its own `odds`, which are then of as many tokens.
    """

    window: int
    rate: float
    odds: Odds | None = None

    def gain(self, length: int) -> float:
        """Tokens that a draft of this length is expected to add."""
        return gain(self.rate, length) if self.odds is None else self.odds.gains[length]

    def worth_while(self, price: float) -> int:
        """How many tokens of a draft gain at least `price` each."""
        if self.odds is None:
            return min(self.window, _worth_while(self.rate, price))
        return min(self.window, bisect_left(self.odds.whole, -price))


def gain(rate: float, length: int) -> float:
    """Tokens that a draft of this length is expected to add."""
    rate = min(max(rate, 0.0), CERTAIN)
    return rate * (1 - rate**length) / (1 - rate)


def draft_lengths(rows: Sequence[Row], cost: StepCost) -> list[int]:
    """The lengths at which the batch makes most tokens per second."""
    lengths = [row.window for row in rows]
    if cost.token_s <= 0:
        return lengths
    worth = len(rows) / max(cost.seconds(len(rows)), 1e-12)
    for _ in range(8):  # it converges faster than any line search; 3 or 4 rounds are usual
        price = cost.token_s * worth
        lengths = [row.worth_while(price) for row in rows]
        better = speed(rows, lengths, cost)
        if better <= worth * (1 + 1e-9):
            break
        worth = better
    return lengths


def levelled(rows: Sequence[Row], lengths: Sequence[int], cost: StepCost) -> list[int]:
    """The same lengths, cut to the one at which the batch is fastest if every row takes as many
    places as the longest draft.
    """
    if cost.token_s <= 0 or min(lengths) == max(lengths):
        return list(lengths)

    def worth(longest: int) -> float:
        cut = [min(n, longest) for n in lengths]
        tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, cut, strict=True))
        given = len(rows) + sum(cut)
        empty = len(rows) * (1 + longest) - given
        return tokens / cost.seconds(given + PADDING * empty)

    best = max(sorted(set(lengths)), key=worth)
    return [min(n, best) for n in lengths]


def speed(rows: Sequence[Row], lengths: Sequence[int], cost: StepCost) -> float:
    """Expected tokens per second with these drafts."""
    tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, lengths, strict=True))
    return tokens / max(cost.seconds(len(rows) + sum(lengths)), 1e-12)


def best_draft(rows: int, most: int, found: float, rate: float, cost: StepCost) -> float:
    """Tokens per second of equal rows at the best length up to `most`, where a draft is `found`
    with this probability; 0 where no length is better than none.
    """
    best, without = 0.0, rows / max(cost.seconds(rows), 1e-12)
    for length in range(1, most + 1):
        tokens = rows * (1 + found * gain(rate, length))
        worth = tokens / max(cost.seconds(rows * (1 + found * length)), 1e-12)
        best = max(best, worth)
    return best if best > without else 0.0


def _worth_while(rate: float, price: float) -> int:
    """How many tokens of a draft gain at least `price` each."""
    rate = min(max(rate, 0.0), CERTAIN)
    if rate <= price:
        return 0
    return int(math.log(price) / math.log(rate) + 1e-9)
