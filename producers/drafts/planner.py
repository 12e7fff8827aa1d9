"""Chooses the draft lengths that maximise the tokens per second of a batch."""

import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rollstream.producers.engines.drafting import Draft

MEASUREMENT_DECAY = 0.98  # each pass multiplies the weight of earlier ones: about 50 count
OUTLIER_FACTOR = 4.0  # a pass that took more than so many times its expected time was interrupted
RATE_MAX = 0.999  # higher acceptance rates are cut to this
# Time of a place that a shorter draft leaves empty (attention covers it), as a share of a token's.
PADDING_COST = 0.5


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a forward pass itself, and of each token in it."""

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Holds weighted sums over measured passes, newer ones with more weight."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def seen(self, tokens: float, seconds: float) -> "StepTimes":
        if self.count >= 3:
            # The pass may have been interrupted.
            seconds = min(seconds, OUTLIER_FACTOR * self.cost().seconds(tokens))
        return StepTimes(
            self.count * MEASUREMENT_DECAY + 1,
            self.tokens * MEASUREMENT_DECAY + tokens,
            self.seconds * MEASUREMENT_DECAY + seconds,
            self.tokens_squared * MEASUREMENT_DECAY + tokens * tokens,
            self.product * MEASUREMENT_DECAY + tokens * seconds,
        )

    def times(self, factor: float) -> "StepTimes":
        # As if each pass had taken `factor` times as long.
        return replace(self, seconds=self.seconds * factor, product=self.product * factor)

    def cost(self) -> StepCost:
        if not self.count:
            return StepCost(0.0, 0.0)
        mean, level = self.tokens / self.count, self.seconds / self.count
        spread = self.tokens_squared / self.count - mean * mean
        if spread < 0.01 * mean * mean or mean <= 0:
            # All passes had about equally many tokens.
            return StepCost(level, 0.0)
        slope = (self.product / self.count - mean * level) / spread
        # At most the slope of the line from the origin through the mean.
        slope = min(max(slope, 0.0), level / mean)
        return StepCost(level - slope * mean, slope)


@dataclass(frozen=True, slots=True)
class DraftOdds:
    """`whole[d - 1]` is the probability that all d tokens are accepted, negated so that the values
    ascend (for bisection); `gains[d]` is the expected number of accepted tokens.
    """

    whole: tuple[float, ...]
    gains: tuple[float, ...]

    @classmethod
    def of(cls, chances: Iterable[float]) -> "DraftOdds":
        """Returns the odds by each token's acceptance probability, if all before it are."""
        probabilities: list[float] = []
        product = 1.0
        for chance in chances:
            product *= min(chance, RATE_MAX)
            probabilities.append(product)
        return cls(
            tuple(-probability for probability in probabilities),
            tuple(accumulate(probabilities, initial=0.0)),
        )


@dataclass(frozen=True, slots=True)
class DraftRow:
    """`odds` must cover `window` tokens; without them each token is accepted with probability
    `rate` if all before it are.
    """

    window: int
    rate: float
    odds: DraftOdds | None = None

    def gain(self, length: int) -> float:
        return expected_gain(self.rate, length) if self.odds is None else self.odds.gains[length]

    def worth_while(self, price: float) -> int:
        """Returns how many tokens gain more than `price`, the tokens that the batch generates in
        the time of one more.
        """
        if self.odds is None:
            return min(self.window, _worth_while(self.rate, price))
        return min(self.window, bisect_left(self.odds.whole, -price))


def expected_gain(rate: float, length: int) -> float:
    """Returns a + a² + … + a^length: each token is accepted with probability a = `rate` when all
    before it are.
    """
    rate = min(max(rate, 0.0), RATE_MAX)
    return rate * (1 - rate**length) / (1 - rate)


def draft_lengths(rows: Sequence[DraftRow], cost: StepCost) -> list[int]:
    """Returns the lengths with the most tokens per second; whole windows while a token takes no
    measurable time.

    One more token pays while its gain per second is above the tokens per second of the batch:
    Seer's marginal benefit (section 3.7). That speed depends on the lengths in turn, so both are
    found together, by Dinkelbach's iteration for ratios (Management Science 13, 1967).
    """
    lengths = [row.window for row in rows]
    if cost.token_s <= 0:
        return lengths
    speed = len(rows) / max(cost.seconds(len(rows)), 1e-12)
    for _ in range(8):  # converges faster than a line search; 3 or 4 rounds are usual
        price = cost.token_s * speed
        lengths = [row.worth_while(price) for row in rows]
        better = tokens_per_s(rows, lengths, cost)
        if better <= speed * (1 + 1e-9):
            break
        speed = better
    return lengths


def level_lengths(rows: Sequence[DraftRow], lengths: Sequence[int], cost: StepCost) -> list[int]:
    """Returns the lengths cut to the common maximum at which a batch padded to its longest draft is
    fastest.
    """
    if cost.token_s <= 0 or min(lengths) == max(lengths):
        return list(lengths)

    def speed(longest: int) -> float:
        cut = [min(n, longest) for n in lengths]
        tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, cut, strict=True))
        filled = len(rows) + sum(cut)
        empty = len(rows) * (1 + longest) - filled
        return tokens / cost.seconds(filled + PADDING_COST * empty)

    best = max(sorted(set(lengths)), key=speed)
    return [min(n, best) for n in lengths]


def tokens_per_s(rows: Sequence[DraftRow], lengths: Sequence[int], cost: StepCost) -> float:
    tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, lengths, strict=True))
    return tokens / max(cost.seconds(len(rows) + sum(lengths)), 1e-12)


def best_draft_speed(
    rows: int, length_max: int, hit_rate: float, rate: float, cost: StepCost
) -> float:
    """Returns tokens per second of `rows` equal rows at the best draft length; 0 if no draft is
    better. `hit_rate` is the probability that a look-up finds a draft.
    """
    best, without = 0.0, rows / max(cost.seconds(rows), 1e-12)
    for length in range(1, length_max + 1):
        tokens = rows * (1 + hit_rate * expected_gain(rate, length))
        speed = tokens / max(cost.seconds(rows * (1 + hit_rate * length)), 1e-12)
        best = max(best, speed)
    return best if best > without else 0.0


def _worth_while(rate: float, price: float) -> int:
    rate = min(max(rate, 0.0), RATE_MAX)
    if rate <= price:
        return 0
    # The largest n with rateⁿ above the price.
    return int(math.log(price) / math.log(rate) + 1e-9)


CURVE_EDGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
"""The first number of known tokens of each point of the curve."""
KNOWN_TOKENS_MAX = 64  # more known tokens are counted as this many
PRIOR, PRIOR_TRIALS = 0.9, 4.0  # acceptance that is assumed before any trial, and its weight
REFRESH_TRIALS = 64  # trials after which the odds are computed from the curve again
# Weight of earlier trials after that. It lets the prior return at a point of low acceptance, which
# is then tried again.
REFRESH_DECAY = 0.98

# Most known tokens of a draft that continues behind a mistake: the history may be shifted there.
KNOWN_AFTER_MISTAKE = 2

_CURVE_POINT = tuple(bisect(CURVE_EDGES, count) - 1 for count in range(KNOWN_TOKENS_MAX + 1))


@dataclass(slots=True)
class HistoryAgreement:
    """`agreed` estimates how many newest tokens of a sequence agree with the history, `known`
    counts those before the present draft, `continuation` holds the history's next tokens.
    """

    agreed: int = 0
    known: int = 0
    continuation: Sequence[int] = ()

    def start_draft(self, draft: Draft, context: int) -> Sequence[int]:
        """Returns the tokens to draft; after a failed look-up the last draft's rest behind its
        mistake.
        """
        if draft.tokens or not self.continuation:
            # A match of the longest context may extend further back.
            is_whole = draft.matched >= context
            self.known = max(draft.matched, self.agreed) if is_whole else draft.matched
            self.continuation = draft.tokens
        else:
            # The rest is right if the model replaced only that one token.
            self.known = min(self.agreed, KNOWN_AFTER_MISTAKE)
        return self.continuation

    def end_draft(self, tried: int, right: int) -> None:
        """Record that `right` of `tried` drafted tokens were accepted."""
        if tried:
            # After a mistake the drawn token differs from the history's.
            self.agreed = self.known + tried + 1 if right == tried else 1
        else:
            self.agreed += 1
        self.continuation = self.continuation[right + 1 :]


class AcceptanceCurve:
    """Learns the acceptance probability of a token by the known tokens before it, from one engine's
    drafts. After j accepted tokens j more are known, so that of all d is a product along the curve.
    """

    def __init__(self, length_max: int) -> None:
        self.most = length_max
        self._right = [0.0] * len(CURVE_EDGES)
        self._tried = [0.0] * len(CURVE_EDGES)
        self._odds: dict[int, DraftOdds] = {}
        self._fresh = 0

    def add(self, known_tokens: int, tried: int, right: int) -> None:
        # Tokens after the first mistake do not count.
        trials = right + (right < tried)
        for place in range(trials):
            point = _CURVE_POINT[min(known_tokens + place, KNOWN_TOKENS_MAX)]
            self._right[point] += place < right
            self._tried[point] += 1
        self._fresh += trials
        if self._fresh >= REFRESH_TRIALS:
            self._right = [REFRESH_DECAY * right for right in self._right]
            self._tried = [REFRESH_DECAY * tried for tried in self._tried]
            self._odds, self._fresh = {}, 0

    def probability(self, known_tokens: int) -> float:
        point = _CURVE_POINT[min(known_tokens, KNOWN_TOKENS_MAX)]
        return (self._right[point] + PRIOR * PRIOR_TRIALS) / (self._tried[point] + PRIOR_TRIALS)

    def odds(self, known_tokens: int) -> DraftOdds:
        known_tokens = min(known_tokens, KNOWN_TOKENS_MAX)
        if known_tokens not in self._odds:
            self._odds[known_tokens] = DraftOdds.of(
                self.probability(known_tokens + place) for place in range(self.most)
            )
        return self._odds[known_tokens]
