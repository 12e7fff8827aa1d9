"""Computes the draft lengths that maximise the tokens per second of the whole batch
(`draft_lengths`), and the best speed with drafts (`best_draft_speed`). Both weigh the tokens gained
by drafts against a longer pass, the forward pass that verifies the drafts of all sequences.

`StepTimes` fits the cost of a pass. The gain follows from acceptance probabilities: one rate for
all tokens where no more is known, else the `DraftOdds` that `AcceptanceCurve` learns from verified
drafts, by how far a sequence agrees with the history of earlier answers (`HistoryAgreement`).
"""

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
    """Gives the cost of a forward pass: seconds of the pass itself, and of each token in it."""

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Holds weighted sums over measured passes, newer ones with more weight. `cost` fits a straight
    line to them: the seconds of a pass by its number of tokens.
    """

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def seen(self, tokens: float, seconds: float) -> "StepTimes":
        """Returns the sums with one more pass; its time is cut at `OUTLIER_FACTOR` times the
        expected one.
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
        """Returns the sums as if each pass had taken `factor` times as long."""
        return replace(self, seconds=self.seconds * factor, product=self.product * factor)

    def cost(self) -> StepCost:
        """Returns the cost by the straight line that fits the measurements. If all passes had about
        equally many tokens, their whole time is fixed cost.

        Neither part is negative: the slope is at least 0, and at most that of the line from the
        origin through the mean.
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
    """Holds the odds of a draft by its length d. `whole[d - 1]` is the probability that all d
    tokens are accepted, negated so that the values ascend (for bisection); `gains[d]` is the
    expected number of accepted tokens.
    """

    whole: tuple[float, ...]
    gains: tuple[float, ...]

    @classmethod
    def of(cls, chances: Iterable[float]) -> "DraftOdds":
        """Returns the odds that follow from the acceptance probability of each token, given that
        the tokens before it are accepted.
        """
        whole: list[float] = []
        product = 1.0
        for chance in chances:
            product *= min(chance, RATE_MAX)
            whole.append(product)
        return cls(tuple(-one for one in whole), tuple(accumulate(whole, initial=0.0)))


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Describes a sequence of the batch: at most `window` tokens are drafted for it. `odds` states
    how likely they are accepted, and must cover `window` tokens; without `odds` each token is
    accepted with probability `rate` if all before it are.
    """

    window: int
    rate: float
    odds: DraftOdds | None = None

    def gain(self, length: int) -> float:
        """Returns the expected number of accepted tokens of a draft of this length."""
        return expected_gain(self.rate, length) if self.odds is None else self.odds.gains[length]

    def worth_while(self, price: float) -> int:
        """Returns the number of drafted tokens of which each gains more than `price`. A token's
        gain is the probability that it and all before it are accepted; `price` is the number of
        tokens that the batch generates in the time that one more token takes.
        """
        if self.odds is None:
            return min(self.window, _worth_while(self.rate, price))
        return min(self.window, bisect_left(self.odds.whole, -price))


def expected_gain(rate: float, length: int) -> float:
    """Returns the expected number of accepted tokens of a draft of this length, if each is accepted
    with probability a = `rate`: a + a² + … + a^length, because a token counts only if all before it
    are accepted too.
    """
    rate = min(max(rate, 0.0), RATE_MAX)
    return rate * (1 - rate**length) / (1 - rate)


def draft_lengths(rows: Sequence[DraftRow], cost: StepCost) -> list[int]:
    """Returns the draft lengths at which the batch generates the most tokens per second; whole
    windows while a token takes no measurable time.

    Each token of a draft gains the probability that it and all before it are accepted. One more
    token pays while its gain per second is above the tokens per second of the batch: Seer's
    marginal benefit (section 3.7). That speed depends on the lengths in turn, so both are found
    together, by Dinkelbach's iteration for ratios (Management Science 13, 1967).
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
    """Returns the lengths cut to one common maximum, for an engine that pads every row to the
    longest draft: the maximum at which such a batch is fastest.
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
    """Returns the expected tokens per second with drafts of these lengths."""
    tokens = len(rows) + sum(r.gain(n) for r, n in zip(rows, lengths, strict=True))
    return tokens / max(cost.seconds(len(rows) + sum(lengths)), 1e-12)


def best_draft_speed(rows: int, most: int, found: float, rate: float, cost: StepCost) -> float:
    """Returns the tokens per second of `rows` equal rows at the best draft length up to `most`; 0
    if no length is better than no draft. A look-up finds a draft with probability `found`; each of
    its tokens is accepted with probability `rate` if all before it are.
    """
    best, without = 0.0, rows / max(cost.seconds(rows), 1e-12)
    for length in range(1, most + 1):
        tokens = rows * (1 + found * expected_gain(rate, length))
        speed = tokens / max(cost.seconds(rows * (1 + found * length)), 1e-12)
        best = max(best, speed)
    return best if best > without else 0.0


def _worth_while(rate: float, price: float) -> int:
    """Returns `DraftRow.worth_while` for tokens of one acceptance rate."""
    rate = min(max(rate, 0.0), RATE_MAX)
    if rate <= price:
        return 0
    return int(math.log(price) / math.log(rate) + 1e-9)


CURVE_EDGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
"""The first number of known tokens of each point of the curve. The known tokens of a drafted token
are those directly before it that are known to agree with the history.
"""
KNOWN_TOKENS_MAX = 64  # more known tokens are counted as this many
PRIOR, PRIOR_TRIALS = 0.9, 4.0  # acceptance that is assumed before any trial, and its weight
REFRESH_TRIALS = 64  # trials after which the odds are computed from the curve again
# Weight of earlier trials after that. It lets the prior return at a point of low acceptance, which
# is then tried again.
REFRESH_DECAY = 0.98

# Most known tokens of a draft that continues behind a mistake: the history may be shifted there.
KNOWN_AFTER_MISTAKE = 2

_CURVE_POINT = tuple(bisect(CURVE_EDGES, known) - 1 for known in range(KNOWN_TOKENS_MAX + 1))


@dataclass(slots=True)
class HistoryAgreement:
    """Tracks how far one sequence agrees with the history. `agreed` estimates how many of its
    newest tokens do: matched and accepted ones, and, unproven, those that the model drew itself; a
    mistake sets it to 1. `continuation` holds the history's next tokens; `known` is the number of
    known tokens before the present draft.
    """

    agreed: int = 0
    known: int = 0
    continuation: Sequence[int] = ()

    def start_draft(self, draft: Draft, context: int) -> Sequence[int]:
        """Returns the tokens to draft: those of `draft`, or, if the look-up found none, the rest of
        the last draft behind its mistake. That rest is right if the model replaced only that one
        token. `context` is the longest match that a look-up can find.
        """
        if draft.tokens or not self.continuation:
            # A match of the longest context may extend further back.
            is_whole = draft.matched >= context
            self.known = max(draft.matched, self.agreed) if is_whole else draft.matched
            self.continuation = draft.tokens
        else:
            self.known = min(self.agreed, KNOWN_AFTER_MISTAKE)
        return self.continuation

    def end_draft(self, tried: int, right: int) -> None:
        """Record that `right` of `tried` drafted tokens were accepted. After them the model drew a
        token of its own; if the draft ended by a mistake, this token differs from the history's.
        """
        if tried:
            self.agreed = self.known + tried + 1 if right == tried else 1
        else:
            self.agreed += 1
        self.continuation = self.continuation[right + 1 :]


class AcceptanceCurve:
    """Learns the acceptance probability of a drafted token by its number of known tokens, from all
    verified drafts of one engine. Drafts have at most `most` tokens.

    The more tokens are known to agree, the more often the next drafted token is accepted: more
    after a match of seven tokens than of three, and more still after thirty accepted ones. After j
    accepted tokens of a draft, j more tokens are known to agree, so the probability that all d
    tokens of a draft are accepted is a product along the curve.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._right = [0.0] * len(CURVE_EDGES)
        self._tried = [0.0] * len(CURVE_EDGES)
        self._odds: dict[int, DraftOdds] = {}
        self._fresh = 0

    def add(self, known: int, tried: int, right: int) -> None:
        """Record that of a draft after `known` known tokens the first `right` were accepted, out of
        `tried`. Tokens after the first mistake were not tried and do not count.
        """
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
        """Returns the probability that the token after `known` known tokens is accepted."""
        point = _CURVE_POINT[min(known, KNOWN_TOKENS_MAX)]
        return (self._right[point] + PRIOR * PRIOR_TRIALS) / (self._tried[point] + PRIOR_TRIALS)

    def odds(self, known: int) -> DraftOdds:
        """Returns the odds of a draft after `known` known tokens; they are computed again after
        every `REFRESH_TRIALS` trials.
        """
        known = min(known, KNOWN_TOKENS_MAX)
        if known not in self._odds:
            self._odds[known] = DraftOdds.of(
                self.probability(known + place) for place in range(self.most)
            )
        return self._odds[known]
