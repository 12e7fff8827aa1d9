"""What an engine does with guesses, row by row: asks the history, learns from what was verified,
and tells siblings what they may guess from. The engine says when a row drafts, and what a pass gave
it.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from producers.engines.base import DraftStats
from producers.engines.drafts.chances import Agreement, Chances
from producers.engines.drafts.plan import Row, draft_lengths, levelled
from producers.engines.drafts.source import NOTHING, Draft, DraftSource
from producers.engines.drafts.switch import Switch
from producers.engines.drafts.unsaid import Unsaid

TELL_TOKENS = 32  # of a running sequence since its siblings heard of it


@dataclass(slots=True)
class Guessed:
    """A sequence of the batch, which a history knows by `prompt` and `group`. `told` of its tokens
    are known to its siblings, or were guessed and so are no news.
    """

    prompt: int
    group: int
    window: int
    told: int
    has_news: bool = True
    agreement: Agreement = field(default_factory=Agreement)
    how: Unsaid = field(default_factory=Unsaid)


@dataclass
class Guessing:
    """One engine's; the model's tokens are below `vocabulary`."""

    source: DraftSource
    switch: Switch
    vocabulary: int
    clock: Callable[[], float] = time.perf_counter
    chances: Chances = field(init=False)
    counts: Counter[str] = field(default_factory=Counter[str], init=False)
    """The integers of `DraftStats` by name."""
    lookup_s: float = field(default=0.0, init=False)
    undecided_steps: int = field(default=0, init=False)
    """Since the switch was looked at, for `decided_rows`."""
    decided_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.chances = Chances(self.switch.rule.most)

    def stats(self) -> DraftStats:
        return DraftStats(**self.counts, lookup_s=self.lookup_s)

    def decide(self, rows: int, drafts: bool, steps: int = 1) -> bool:
        """Whether to draft from here on, thought over now and then; `drafts`: it does so now, and
        did for so many steps.
        """
        if rows != self.decided_rows or self.undecided_steps >= self.switch.look_steps:
            self.decided_rows, self.undecided_steps = rows, 0
            self.counts["changes"] += self.switch.decide(rows, self.clock()) != drafts
            drafts = self.switch.on
        self.undecided_steps += steps
        return drafts

    def ask(self, row: Guessed, newest: Sequence[int], most: int) -> Draft:
        """What may follow, up to the first that is no token of this model: another one's history,
        or torn memory.
        """
        draft = self.source.draft(row.prompt, newest, most)
        if not draft.tokens or max(draft.tokens) < self.vocabulary:
            return draft
        kept = list(takewhile(lambda token: token < self.vocabulary, draft.tokens))
        return Draft(kept, draft.matched) if kept else NOTHING

    def coming(self, row: Guessed, newest: Sequence[int], most: int) -> list[int]:
        """What may be guessed next, if it pays."""
        draft = self.ask(row, newest, most)
        coming = list(row.agreement.looked_up(draft, self.source.context)[:most])
        row.how.looked_up(bool(draft.tokens))
        self.counts["asked"] += 1
        self.counts["found"] += bool(draft.tokens)
        self.switch.found.add(1, bool(coming))
        return coming

    def worth(
        self, rows: Sequence[Guessed], longest: list[int], *, is_padded: bool = False
    ) -> list[int]:
        """How much of each row's draft pays; `is_padded` where every row of a pass takes as many
        places as the longest.
        """
        if self.switch.forced or not any(longest):
            return longest
        known = [self.chances.odds(row.agreement.known) for row in rows]
        rated = [Row(length, 0.0, odds) for length, odds in zip(longest, known, strict=True)]
        cost = self.switch.passes.cost()
        lengths = draft_lengths(rated, cost)
        return levelled(rated, lengths, cost) if is_padded else lengths

    def spent(self, rows: Sequence[Guessed], seconds: float) -> None:
        """All of it, on all of these rows together."""
        self.lookup_s += seconds
        for row in rows:
            row.how.lookup_s += seconds / len(rows)

    def verified(self, row: Guessed, draft: Sequence[int], gained: Sequence[int]) -> None:
        """A pass with this draft gave these tokens: what was right of it, then one that the model
        drew, unless a guessed one ended the sequence.
        """
        guessed, tried, right = len(draft), len(draft), len(gained) - 1
        if right < tried and gained[-1] == draft[right]:
            tried = right = right + 1  # it guessed the end; what is behind was not tried
        if draft:
            row.window = self.switch.rule.after(row.window, tried, right)
            self.chances.add(row.agreement.known, tried, right)
            self.switch.right.add(tried, right)
        row.agreement.verified(tried, right)
        row.how.verified(guessed, right, len(gained))
        row.has_news |= right == 0 or right < tried
        self.counts["proposed"] += guessed
        self.counts["accepted"] += right

    def attempt(self, row: Guessed, newest: Sequence[int], most: int) -> Draft:
        """What would be guessed, only to be `compared`."""
        draft = self.ask(row, newest, most)
        self.switch.found.add(1, bool(draft.tokens))
        return draft

    def compared(self, draft: Draft, came: Sequence[int]) -> None:
        """How right it would have been about the tokens that came."""
        if draft.tokens:
            pairs = zip(draft.tokens, came, strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.switch.right.add(len(draft.tokens), right)
            self.chances.add(draft.matched, len(draft.tokens), right)

    def tell(self, row: Guessed, tokens: NDArray[np.integer], least: int = TELL_TOKENS) -> None:
        """Siblings may draft from what this row has, unless all of it was drafted; not yet while
        fewer than `least` of its tokens are new to them.
        """
        fresh = len(tokens) - row.told
        if fresh < least:
            return
        if fresh and row.has_news:
            known = tokens[max(0, row.told - self.source.context) :].astype(np.uint32, copy=False)
            self.source.grown(row.prompt, row.group, known, fresh)
        row.told, row.has_news = len(tokens), False
