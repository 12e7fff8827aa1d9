"""The guesses of vLLM's batch, from step to step: which rows draft how many tokens, and what of it
was right.

The rules are those of `producers/engines/drafts` (window, marginal benefit, switch). vLLM packs the
tokens of a step without padding and takes another number of them from each row, so lengths are not
levelled. While the switch is off, guesses are made now and then, kept, and compared with what came:
a history that heard of these tokens meanwhile must not look right about them.
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
from producers.engines.drafts.plan import Row, draft_lengths
from producers.engines.drafts.source import NOTHING, Draft, DraftSource
from producers.engines.drafts.switch import Switch

DECIDE_STEPS = 16  # between two looks at the switch while as many rows run
TRY_EVERY = 16  # tokens of a row between two guesses that are only compared
TRY_TOKENS = 8
TELL_TOKENS = 32  # of a running sequence since its siblings heard of it


@dataclass(frozen=True, slots=True)
class Seen:
    """A request after a step that gave it `gained` (nothing while its prompt is not through): all
    its `tokens`, and how many more it may generate.
    """

    key: str
    prompt: int
    group: int
    gained: Sequence[int]
    tokens: NDArray[np.int32]
    room: int

    @property
    def begun(self) -> int:
        """Its tokens before this step."""
        return len(self.tokens) - len(self.gained)


@dataclass(slots=True)
class _Guessed:
    """What is known of a row; `draft` is what the step under way verifies. `tried` was guessed at
    `tried_at` to be compared only. `told` of its tokens are known to its siblings, or were guessed
    and so are no news.
    """

    window: int
    agreement: Agreement = field(default_factory=Agreement)
    draft: list[int] = field(default_factory=list[int])
    tried: Draft = NOTHING
    tried_at: int = -TRY_EVERY
    told: int = 0
    has_news: bool = True


class Guesses:
    """One engine's; its tokens are below `vocabulary`."""

    def __init__(
        self,
        source: DraftSource,
        switch: Switch,
        vocabulary: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source, self.switch, self.vocabulary = source, switch, vocabulary
        self.clock = clock
        self.chances = Chances(switch.rule.most)
        self.counts: Counter[str] = Counter()
        """The integers of `DraftStats` by name."""
        self.lookup_s = 0.0
        self._rows: dict[str, _Guessed] = {}
        self._began: float | None = None
        self._decided_rows = self._undecided_steps = 0

    def stats(self) -> DraftStats:
        return DraftStats(**self.counts, lookup_s=self.lookup_s)

    def after(self, batch: Sequence[Seen]) -> list[list[int]]:
        """Drafts for the next step, some or all of them empty.

        1. What the last ones came to.  2. What that step took.  3. The switch.  4. The next ones.
        """
        began, least = self.clock(), self.switch.rule.least
        is_measured = all(seen.gained and seen.key in self._rows for seen in batch)
        self._rows = {
            seen.key: self._rows.get(seen.key) or _Guessed(least, told=seen.begun) for seen in batch
        }
        rows = [(seen, self._rows[seen.key]) for seen in batch if seen.gained]
        for seen, row in rows:  # 1
            self._judge(row, seen)
        self._measure(rows, began, is_measured)  # 2
        for row in self._rows.values():
            row.draft = []
        self._decide(len(rows))  # 3
        if self.switch.on:  # 4
            for seen, row in rows:
                self._tell(row, seen)
            self._guess(rows)
        elif self.switch.forced is None:
            for seen, row in rows:
                self._try(row, seen)
        self.lookup_s += self.clock() - began
        self._began = began
        return [self._rows[seen.key].draft for seen in batch]

    def _judge(self, row: _Guessed, seen: Seen) -> None:
        """A sampler stops at the first token that is not the draft's."""
        tried, right = len(row.draft), _equal(row.draft, seen.gained)
        if tried:
            row.window = self.switch.rule.after(row.window, tried, right)
            self.chances.add(row.agreement.known, tried, right)
            self.switch.right.add(tried, right)
        if self.switch.on:
            row.agreement.verified(tried, right)
        else:
            row.agreement = Agreement()
        self.counts["proposed"] += tried
        self.counts["accepted"] += right
        row.has_news |= right == 0 or right < tried

    def _measure(
        self, rows: Sequence[tuple[Seen, _Guessed]], began: float, is_measured: bool
    ) -> None:
        """From one look at the batch to the next; a step that took prompts says nothing."""
        guessed = sum(len(row.draft) for _, row in rows)
        gained = sum(len(seen.gained) for seen, _ in rows)
        if guessed:
            self.counts.update(passes=1, rows=len(rows), gained=gained)
        if not rows or not is_measured or self._began is None:
            return
        seconds = began - self._began
        if self.switch.on:
            self.switch.verified(len(rows) + guessed, gained, seconds)
        if not guessed:  # the same to vLLM, whether drafts were wanted or not
            self.switch.plain_steps(len(rows), seconds)

    def _decide(self, rows: int) -> None:
        self._undecided_steps += 1
        if rows == self._decided_rows and self._undecided_steps < DECIDE_STEPS:
            return
        self._decided_rows, self._undecided_steps = rows, 0
        before = self.switch.on
        self.counts["changes"] += self.switch.decide(rows) != before

    def _guess(self, rows: Sequence[tuple[Seen, _Guessed]]) -> None:
        """What pays of what the history has; none reaches the last token that its request may
        generate.
        """
        for seen, row in rows:
            most = min(row.window, seen.room - 1)
            if most <= 0:
                continue
            draft = self._ask(seen, most)
            row.draft = list(row.agreement.looked_up(draft, self.source.context)[:most])
            self.counts["asked"] += 1
            self.counts["found"] += bool(draft.tokens)
            self.switch.found.add(1, bool(row.draft))
        if self.switch.forced or not any(row.draft for _, row in rows):
            return
        odds = [Row(len(row.draft), 0.0, self.chances.odds(row.agreement.known)) for _, row in rows]
        lengths = draft_lengths(odds, self.switch.passes.cost())
        for (_, row), length in zip(rows, lengths, strict=True):
            del row.draft[length:]

    def _tell(self, row: _Guessed, seen: Seen) -> None:
        """Siblings may draft from what this row has, unless all of it was drafted."""
        length = len(seen.tokens)
        fresh = length - row.told
        if fresh < TELL_TOKENS:
            return
        if row.has_news:
            known = seen.tokens[max(0, row.told - self.source.context) :].astype(np.uint32)
            self.source.grown(seen.prompt, seen.group, known, fresh)
        row.told, row.has_news = length, False

    def _try(self, row: _Guessed, seen: Seen) -> None:
        """What would have been right, for nothing."""
        length = len(seen.tokens)
        if length - row.tried_at < TRY_EVERY:
            return
        tried = row.tried.tokens
        if tried:
            came = seen.tokens[row.tried_at : row.tried_at + len(tried)].tolist()
            right = _equal(tried, came)
            self.switch.right.add(len(tried), right)
            self.chances.add(row.tried.matched, len(tried), right)
        row.tried, row.tried_at = self._ask(seen, TRY_TOKENS), length
        self.switch.found.add(1, bool(row.tried.tokens))

    def _ask(self, seen: Seen, most: int) -> Draft:
        """Up to the first that is no token of this model: another one's history, or torn memory."""
        newest = seen.tokens[-self.source.context :].tolist()
        draft = self.source.draft(seen.prompt, newest, most)
        kept = list(takewhile(lambda token: 0 <= token < self.vocabulary, draft.tokens))
        return Draft(kept, draft.matched) if kept else NOTHING


def _equal(guessed: Sequence[int], came: Sequence[int]) -> int:
    """How many of the first ones are the same."""
    pairs = zip(guessed, came, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
