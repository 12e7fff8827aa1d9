"""Computes the draft lengths that maximise the tokens per second of the whole batch, and the best
speed with drafts; both follow from acceptance probabilities, which are learned here too.

A pass over n tokens takes `fixed_s + token_s · n` (`StepTimes` fits that from measured passes).
Each token of a draft gains the probability that it and all before it are accepted: a + a² + … + a^d
where one acceptance rate a is all that is known, else a product along `DraftOdds`. One more token
pays while its gain per second is above that of the batch: Seer's marginal benefit (section 3.7),
solved by Dinkelbach's iteration for the ratio (Management Science 13, 1967).

The more tokens of a sequence are known to agree with the history, the more often the next drafted
token is accepted: more after a match of seven tokens than of three, and more still after thirty
accepted ones. `AcceptanceCurve` learns this probability by the number of known tokens from every
verified draft. After j accepted tokens of a draft, j more tokens are known to agree, so the
probability that all d tokens of a draft are accepted is a product along the curve.
"""

import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rollstream.producers.drafts.index import Draft

MEASUREMENT_DECAY = 0.98  # weight of a measurement after the next one: about the last 50 count
OUTLIER_FACTOR = 4.0  # a pass that took this many times its expected time was interrupted
RATE_MAX = 0.999  # higher acceptance rates are cut to this
# Share of a token's time: attention over a place that a shorter draft leaves empty.
PADDING_COST = 0.5


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a forward pass: seconds of the pass itself, and of each token in it."""

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Weighted sums over measured passes, newer ones with more weight, to fit a straight line."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def seen(self, tokens: float, seconds: float) -> "StepTimes":
        """The sums with one more pass; its time is cut at `OUTLIER_FACTOR` times the expected
        one.
        """
        if self.count >= 3:
            seconds = min(seconds, OUTLIER_FACTOR * self.cost().seconds(tokens))
        return StepTimes(
            self.count * MEASUREMENT_DECAY + 1,
            self.tokens * MEASUREMENT_DECAY + tokens,
            self.seconds * MEASUREMENT_DECAY + seconds,
            self.tokens_squared * MEASUREMENT_DECAY + tokens * tokens,
            self.product * MEASUREMENT_DECAY + tokens * seconds,
        )

    def times(self, factor: float) -> "StepTimes":
        """The sums as if each pass had taken `factor` times as long."""
        return replace(self, seconds=self.seconds * factor, product=self.product * factor)

    def cost(self) -> StepCost:
        """The line through the measurements; all of it is fixed cost where every pass had equally
        many tokens.

        Neither part is negative: the slope is cut to that of the line through the origin, and to 0.
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
class DraftOdds:
    """For a draft of length d, `whole[d - 1]` is the probability that all of it is accepted,
    negated so that the sequence ascends, and `gains[d]` the expected number of accepted tokens.
    """

    whole: tuple[float, ...]
    gains: tuple[float, ...]

    @classmethod
    def of(cls, chances: Iterable[float]) -> "DraftOdds":
        """From the acceptance probability of each token, given that those before it are
        accepted.
        """
        whole: list[float] = []
        product = 1.0
        for chance in chances:
            product *= min(chance, RATE_MAX)
            whole.append(product)
        return cls(tuple(-one for one in whole), tuple(accumulate(whole, initial=0.0)))


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence of the batch: at most `window` tokens are drafted. Each is accepted with
    probability `rate`, or by the sequence's own `odds`, which then cover `window` tokens.
    """

    window: int
    rate: float
    odds: DraftOdds | None = None

    def gain(self, length: int) -> float:
        """The expected number of accepted tokens of a draft of this length."""
        return expected_gain(self.rate, length) if self.odds is None else self.odds.gains[length]

    def worth_while(self, price: float) -> int:
        """The number of drafted tokens that gain at least `price` each."""
        if self.odds is None:
            return min(self.window, _worth_while(self.rate, price))
        return min(self.window, bisect_left(self.odds.whole, -price))


def expected_gain(rate: float, length: int) -> float:
    """The expected number of accepted tokens of a draft of this length."""
    rate = min(max(rate, 0.0), RATE_MAX)
    return rate * (1 - rate**length) / (1 - rate)


def draft_lengths(rows: Sequence[DraftRow], cost: StepCost) -> list[int]:
    """The draft lengths at which the batch generates the most tokens per second."""
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
    """The lengths, each cut to one common maximum. The maximum is the one at which the batch is
    fastest if every row is padded to the longest draft.
    """
    if cost.token_s <= 0 or min(lengths) == max(lengths):
        return list(lengths)

    def speed(longest: int) -> float:
        cut = [min(n, longest) for n in lengths]
        tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, cut, strict=True))
        given = len(rows) + sum(cut)
        empty = len(rows) * (1 + longest) - given
        return tokens / cost.seconds(given + PADDING_COST * empty)

    best = max(sorted(set(lengths)), key=speed)
    return [min(n, best) for n in lengths]


def tokens_per_s(rows: Sequence[DraftRow], lengths: Sequence[int], cost: StepCost) -> float:
    """Expected tokens per second with these drafts."""
    tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, lengths, strict=True))
    return tokens / max(cost.seconds(len(rows) + sum(lengths)), 1e-12)


def best_draft_speed(rows: int, most: int, found: float, rate: float, cost: StepCost) -> float:
    """Tokens per second of `rows` equal rows at the best draft length up to `most`, where a look-up
    finds a draft with probability `found`; 0 where no length is better than no draft.
    """
    best, without = 0.0, rows / max(cost.seconds(rows), 1e-12)
    for length in range(1, most + 1):
        tokens = rows * (1 + found * expected_gain(rate, length))
        speed = tokens / max(cost.seconds(rows * (1 + found * length)), 1e-12)
        best = max(best, speed)
    return best if best > without else 0.0


def _worth_while(rate: float, price: float) -> int:
    """The number of drafted tokens that gain at least `price` each."""
    rate = min(max(rate, 0.0), RATE_MAX)
    if rate <= price:
        return 0
    return int(math.log(price) / math.log(rate) + 1e-9)


CURVE_EDGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
"""The first number of known tokens of each point of the curve."""
KNOWN_TOKENS_MAX = 64  # tokens known to agree; more are counted as this many
PRIOR, PRIOR_TRIALS = 0.9, 4.0
REFRESH_TRIALS = 64  # trials after which values computed from the curve are computed again
REFRESH_DECAY = 0.98  # weight of every point then, so that a point of low acceptance is tried again

# Tokens known to agree after a mistake, at most: the alignment is uncertain.
KNOWN_AFTER_MISTAKE = 2

_CURVE_POINT = tuple(bisect(CURVE_EDGES, known) - 1 for known in range(KNOWN_TOKENS_MAX + 1))


@dataclass(slots=True)
class HistoryAgreement:
    """The agreement of one sequence with the history. Verified drafts have shown that its newest
    `agreed` tokens agree; `continuation` holds the history's next tokens; `known` is the number of
    agreeing tokens when the present draft was looked up.
    """

    agreed: int = 0
    known: int = 0
    continuation: Sequence[int] = ()

    def start_draft(self, draft: Draft, context: int) -> Sequence[int]:
        """The tokens to draft: those of `draft` or, if the look-up found none, the rest of the last
        draft after its mistake, which is right if the model only replaced that one token.
        """
        if draft.tokens or not self.continuation:
            # A match of the longest context that is looked up may extend further back.
            is_whole = draft.matched >= context
            self.known = max(draft.matched, self.agreed) if is_whole else draft.matched
            self.continuation = draft.tokens
        else:
            self.known = min(self.agreed, KNOWN_AFTER_MISTAKE)
        return self.continuation

    def end_draft(self, tried: int, right: int) -> None:
        """Record that `right` of `tried` drafted tokens were accepted. After them the model drew a
        token of its own, which differs from history's if the draft ended by a mistake.
        """
        if tried:
            self.agreed = self.known + tried + 1 if right == tried else 1
        else:
            self.agreed += 1
        self.continuation = self.continuation[right + 1 :]


class AcceptanceCurve:
    """The acceptance probability of a drafted token by the number of known tokens before it,
    learned from the drafts of one engine, which have at most `most` tokens.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._right = [0.0] * len(CURVE_EDGES)
        self._tried = [0.0] * len(CURVE_EDGES)
        self._odds: dict[int, DraftOdds] = {}
        self._fresh = 0

    def add(self, known: int, tried: int, right: int) -> None:
        """Record a draft made after `known` known tokens, verified up to its first mistake."""
        trials = right + (right < tried)
        for place in range(trials):
            point = _CURVE_POINT[min(known + place, KNOWN_TOKENS_MAX)]
            self._right[point] += place < right
            self._tried[point] += 1
        self._fresh += trials
        if self._fresh >= REFRESH_TRIALS:
            self._right = [REFRESH_DECAY * right for right in self._right]
            self._tried = [REFRESH_DECAY * tried for tried in self._tried]
            self._odds, self._fresh = {}, 0

    def probability(self, known: int) -> float:
        """The probability that the token after `known` known tokens is accepted."""
        point = _CURVE_POINT[min(known, KNOWN_TOKENS_MAX)]
        return (self._right[point] + PRIOR * PRIOR_TRIALS) / (self._tried[point] + PRIOR_TRIALS)

    def odds(self, known: int) -> DraftOdds:
        """The odds of a draft after `known` known tokens, recomputed after every `REFRESH_TRIALS`
        trials.
        """
        known = min(known, KNOWN_TOKENS_MAX)
        if known not in self._odds:
            self._odds[known] = DraftOdds.of(
                self.probability(known + place) for place in range(self.most)
            )
        return self._odds[known]
