"""The guesses of vLLM's batch, from step to step: which rows draft how many tokens, and what of it
was right.

vLLM packs the tokens of a step without padding and takes another number of them from each row, so
lengths are not levelled. While the switch is off, guesses are made now and then, kept, and compared
with what came: a history that heard of these tokens meanwhile must not look right about them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from producers.engines.drafts.chances import Agreement
from producers.engines.drafts.guessing import Guessed, Guessing
from producers.engines.drafts.source import NOTHING, Draft
from producers.engines.vllm_engine.tally import Tally

TRY_EVERY = 16  # tokens of a row between two guesses that are only compared
TRY_TOKENS = 8
IDLE_STEPS = 8  # from one look at the batch to the next while nothing is guessed


@dataclass(frozen=True, slots=True)
class Seen:
    """A request after a step that verified `draft` and gave it `gained` (nothing while its prompt
    is not through): all its `tokens`, and how many more it may generate. Counts of its present
    `stay` go to its `place`.
    """

    key: str
    prompt: int
    group: int
    draft: Sequence[int]
    gained: Sequence[int]
    tokens: NDArray[np.int32]
    room: int
    place: int = 0
    stay: int = 0


@dataclass(slots=True)
class _Row(Guessed):
    """`tried` was guessed at `tried_at` to be compared only."""

    tried: Draft = NOTHING
    tried_at: int = -TRY_EVERY


@dataclass
class Guesses(Guessing):
    """One engine's; `tally` is told of all of it, after each step."""

    tally: Tally | None = None
    _rows: dict[str, _Row] = field(default_factory=dict[str, _Row], init=False)
    _began: float | None = field(default=None, init=False)
    _steps: int = field(default=1, init=False)
    """From the last look to the next."""

    def skips(self, keys: Sequence[str]) -> bool:
        """Whether a step of these requests need not be looked at, as looking costs time too:
        nothing is guessed, and the same ones were there the last time.
        """
        is_awake = self.switch.on or self.switch.probing
        if is_awake or self._steps >= IDLE_STEPS or list(keys) != list(self._rows):
            return False
        self._steps += 1
        return True

    def after(self, batch: Sequence[Seen]) -> list[list[int]]:
        """Drafts for the next step, some or all of them empty.

        1. What the last ones came to.  2. What that step took.  3. The switch.  4. The next ones.
        5. What it all came to.
        """
        drafts: dict[str, list[int]] = {}
        began = self.clock()
        keys, steps, self._steps = [seen.key for seen in batch], self._steps, 1
        is_measured = all(seen.gained and seen.key in self._rows for seen in batch)
        is_measured &= steps == 1 or keys == list(self._rows)
        self._rows = {seen.key: self._rows.get(seen.key) or self._begun(seen) for seen in batch}
        rows = [(seen, self._rows[seen.key]) for seen in batch if seen.gained]
        for seen, row in rows:  # 1
            self.verified(row, seen.draft, seen.gained)
            if not self.switch.on:
                row.agreement = Agreement()
        self._measure(rows, began, steps if is_measured else 0)  # 2
        if self.decide(len(rows), self.switch.on, steps):  # 3
            for seen, row in rows:  # 4
                self.tell(row, seen.tokens)
            drafts = self._guess(rows)
        elif self.switch.forced is None:
            for seen, row in rows:
                self._try(row, seen)
        self.spent(list(self._rows.values()), self.clock() - began)
        self._began = began
        self._account(batch)  # 5
        return [drafts.get(seen.key, []) for seen in batch]

    def _begun(self, seen: Seen) -> _Row:
        before = len(seen.tokens) - len(seen.gained)
        return _Row(seen.prompt, seen.group, self.switch.rule.least, before)

    def _measure(self, rows: Sequence[tuple[Seen, _Row]], began: float, steps: int) -> None:
        """So many since the last look; 0: they say nothing, as there were prompts in them."""
        guessed = sum(len(seen.draft) for seen, _ in rows)
        gained = sum(len(seen.gained) for seen, _ in rows)
        if guessed:
            self.counts.update(passes=1, rows=len(rows), gained=gained)
        if not rows or not steps or self._began is None:
            return
        seconds = (began - self._began) / steps
        if self.switch.on:
            self.switch.verified(len(rows), len(rows) + guessed, gained, seconds)
        if not guessed:  # the same to vLLM, whether drafts were wanted or not
            self.switch.plain_steps(len(rows), seconds)

    def _guess(self, rows: Sequence[tuple[Seen, _Row]]) -> dict[str, list[int]]:
        """What pays of what the history has; none reaches the last token that its request may
        generate.
        """
        longest: list[list[int]] = []
        for seen, row in rows:
            most = min(row.window, seen.room - 1)
            longest.append(self.coming(row, self._newest(seen), most) if most > 0 else [])
        lengths = self.worth([row for _, row in rows], [len(draft) for draft in longest])
        cut = zip(rows, longest, lengths, strict=True)
        return {seen.key: draft[:length] for (seen, _), draft, length in cut}

    def _try(self, row: _Row, seen: Seen) -> None:
        """What would have been right, for nothing."""
        if len(seen.tokens) - row.tried_at >= TRY_EVERY:
            self.compared(row.tried, seen.tokens[row.tried_at :].tolist())
            row.tried = self.attempt(row, self._newest(seen), TRY_TOKENS)
            row.tried_at = len(seen.tokens)

    def _account(self, batch: Sequence[Seen]) -> None:
        told = [self._rows[seen.key].how.say() for seen in batch]
        if self.tally is not None:
            for seen, drafts in zip(batch, told, strict=True):
                self.tally.add(seen.place, seen.stay, drafts)
            self.tally.write(self.stats())

    def _newest(self, seen: Seen) -> list[int]:
        return seen.tokens[-self.source.context :].tolist()
