"""The acceptance probability of the next drafted token, by how many tokens before it are known to
agree with history.

A draft that matched seven tokens is accepted more often than one that matched three, and one of
which thirty tokens were just accepted more often still. One curve, learned from every verified
draft, describes both. After j accepted tokens of a draft, j more tokens are known to agree, so the
probability that all d tokens of a draft are accepted is a product along the curve.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.producers.drafts.planner import DraftOdds
from rollstream.producers.drafts.source import Draft

CURVE_EDGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
"""The first number of known tokens of each point of the curve."""
KNOWN_TOKENS_MAX = 64  # tokens known to agree; more are counted as this many
PRIOR, PRIOR_TRIALS = 0.9, 4.0
REFRESH_TRIALS = 64  # trials after which values computed from the curve are computed again
REFRESH_DECAY = 0.98  # weight of every point then, so that a point of low acceptance is tried again

KNOWN_AFTER_MISTAKE = (
    2  # tokens known to agree after a mistake, at most: the alignment is uncertain
)

_CURVE_POINT = tuple(bisect(CURVE_EDGES, known) - 1 for known in range(KNOWN_TOKENS_MAX + 1))


@dataclass(slots=True)
class HistoryAgreement:
    """How one sequence agrees with history: `agreed` of its newest tokens do, as far as drafts have
    shown, `continuation` is what history has next, and `known` tokens agreed when the present draft
    was looked up.
    """

    agreed: int = 0
    known: int = 0
    continuation: Sequence[int] = ()

    def start_draft(self, draft: Draft, context: int) -> Sequence[int]:
        """The tokens to draft: those of `draft` or, where the look-up matched nothing, those that
        the last draft had after its mistake, as if the model had replaced one token by another.
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
    """The learned curve of one engine; drafts have at most `most` tokens."""

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
