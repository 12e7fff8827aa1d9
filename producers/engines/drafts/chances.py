"""How likely the next token of a draft is right, by how many tokens before it are known to agree.

What was recognised over seven tokens goes on more surely than what was over three, and what has
just been right for thirty more surely still: one curve, learned from every draft that was verified,
says both. After j right tokens of a draft j more are known to agree, so the chance that a draft of
d tokens is right to its end is a product along the curve.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from producers.engines.drafts.plan import Odds
from producers.engines.drafts.source import Draft

EDGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 24, 28, 32, 40, 48)
"""Where a new point of the curve begins, in tokens."""
KEPT = 64  # tokens known to agree: more make no difference
PRIOR, PRIOR_TRIALS = 0.9, 4.0
RENEWED = 64  # trials after which what was computed from the curve is computed anew
FADING = 0.98  # of every point then: what is not tried any more for its bad chance is tried again

REPLACED = 2  # tokens known to agree behind a mistake, at most: what it was copied from is a guess

_POINT = tuple(bisect(EDGES, known) - 1 for known in range(KEPT + 1))


@dataclass(slots=True)
class Agreement:
    """Of one sequence: how many of its newest tokens are as history has them, as far as drafts have
    shown, and what history has next; `known` agreed when the present draft was looked up.
    """

    agreed: int = 0
    known: int = 0
    coming: Sequence[int] = ()

    def looked_up(self, draft: Draft, context: int) -> Sequence[int]:
        """What may come next: the draft; where nothing is recognised, what the last draft had
        behind its mistake, as if the model had put one token in another's place.
        """
        if draft.tokens or not self.coming:
            # The longest context that is looked up may be recognised further back.
            is_whole = draft.matched >= context
            self.known = max(draft.matched, self.agreed) if is_whole else draft.matched
            self.coming = draft.tokens
        else:
            self.known = min(self.agreed, REPLACED)
        return self.coming

    def verified(self, tried: int, right: int) -> None:
        """Behind the right ones the model drew a token of its own: after a mistake another one than
        history has.
        """
        if tried:
            self.agreed = self.known + tried + 1 if right == tried else 1
        else:
            self.agreed += 1
        self.coming = self.coming[right + 1 :]


class Chances:
    """Of one engine; drafts have at most `most` tokens."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._right = [0.0] * len(EDGES)
        self._tried = [0.0] * len(EDGES)
        self._odds: dict[int, Odds] = {}
        self._fresh = 0

    def add(self, known: int, tried: int, right: int) -> None:
        """A draft after so many known tokens was tried up to its first mistake."""
        trials = right + (right < tried)
        for place in range(trials):
            point = _POINT[min(known + place, KEPT)]
            self._right[point] += place < right
            self._tried[point] += 1
        self._fresh += trials
        if self._fresh >= RENEWED:
            self._right = [FADING * right for right in self._right]
            self._tried = [FADING * tried for tried in self._tried]
            self._odds, self._fresh = {}, 0

    def chance(self, known: int) -> float:
        """That the token after so many known ones is right."""
        point = _POINT[min(known, KEPT)]
        return (self._right[point] + PRIOR * PRIOR_TRIALS) / (self._tried[point] + PRIOR_TRIALS)

    def odds(self, known: int) -> Odds:
        """Of a draft after so many known tokens; of a moment ago, while little was tried since."""
        known = min(known, KEPT)
        if known not in self._odds:
            self._odds[known] = Odds.of(self.chance(known + place) for place in range(self.most))
        return self._odds[known]
