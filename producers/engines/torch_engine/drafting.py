"""The guesses of a batch: what each row drafts, what of it was right, what its siblings hear.

Everything here is on the host. A row's state lasts as long as it is in the batch; what it gained
and has not said waits here.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from producers.engines.base import DraftStats
from producers.engines.drafts.chances import Agreement, Chances
from producers.engines.drafts.history import prompt_key
from producers.engines.drafts.plan import Row, draft_lengths, levelled
from producers.engines.drafts.source import NOTHING, Draft, DraftSource
from producers.engines.drafts.switch import Switch
from producers.engines.drafts.unsaid import Unsaid
from producers.engines.torch_engine.sequence import Sequence
from producers.engines.torch_engine.verification import accepted
from streams.records import Floats, Tokens

TELL_TOKENS = 32  # of a running sequence since its siblings heard of it
LOOK_BACK = 8  # tokens of a plain step that are held against what history would have guessed


@dataclass(slots=True)
class RowState:
    """`told` of a sequence's tokens are known to its siblings, or were guessed and so are no news;
    what is `unsaid` is part of `Sequence.tokens` already.
    """

    prompt: int
    window: int
    told: int
    has_news: bool = True
    agreement: Agreement = field(default_factory=Agreement)
    how: Unsaid = field(default_factory=Unsaid)
    tokens: list[Tokens] = field(default_factory=list[Tokens])
    logprobs: list[Floats] = field(default_factory=list[Floats])
    unsaid: int = 0

    def keep(self, tokens: Tokens, logprobs: Floats) -> None:
        """Gained; to be said later."""
        if len(tokens):
            self.tokens.append(tokens)
            self.logprobs.append(logprobs)
            self.unsaid += len(tokens)

    def say(self) -> tuple[Tokens, Floats]:
        """All that is unsaid."""
        tokens, logprobs = self.tokens, self.logprobs
        self.tokens, self.logprobs, self.unsaid = [], [], 0
        if not tokens:
            return np.zeros(0, np.uint32), np.zeros(0, np.float32)
        return np.concatenate(tokens), np.concatenate(logprobs)


class Drafting:
    """The rows of one batch, whose tokens are below `vocabulary`."""

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
        self.states: dict[Sequence, RowState] = {}

    def stats(self) -> DraftStats:
        return DraftStats(**self.counts, lookup_s=self.lookup_s)

    def enter(self, sequence: Sequence) -> None:
        request = sequence.request
        prompt = prompt_key(request.tokens, request.sources)
        self.states[sequence] = RowState(prompt, self.switch.rule.least, sequence.length)

    def guess(self, rows: Many[Sequence]) -> list[list[int]]:
        """A draft for each row, perhaps an empty one; none reaches the row's last possible
        token.
        """
        began = self.clock()
        drafts = [self._draft(sequence) for sequence in rows]
        seconds = self.clock() - began
        self.lookup_s += seconds
        each = seconds / len(rows)
        for sequence in rows:
            self.states[sequence].how.lookup_s += each
        lengths = self._lengths(rows, drafts)
        return [list(draft[:length]) for draft, length in zip(drafts, lengths, strict=True)]

    def gain(self, sequence: Sequence, draft: list[int], tokens: list[int], given: Floats) -> None:
        """What a row gained from a pass with this draft, and its log-probabilities."""
        state = self.states[sequence]
        gained = np.array(tokens, np.uint32)
        sequence.gain(gained)
        state.keep(gained, given)
        guessed, tried, right = len(draft), len(draft), len(tokens) - 1
        if right < tried and tokens[-1] == draft[right]:
            tried = right = right + 1  # it guessed the end; what is behind was not tried
        if draft:
            state.window = self.switch.rule.after(state.window, tried, right)
            self.chances.add(state.agreement.known, tried, right)
            self.switch.right.add(tried, right)
        state.agreement.verified(tried, right)
        state.how.verified(guessed, right, len(tokens))
        self.counts["proposed"] += guessed
        self.counts["accepted"] += right
        state.has_news |= right == 0 or right < tried
        if sequence.length - state.told >= TELL_TOKENS:
            self.tell(sequence)

    def drew(self, sequence: Sequence, tokens: Tokens, logprobs: Floats) -> None:
        """Plain steps gave these, the newest tokens of the sequence."""
        state = self.states[sequence]
        state.keep(tokens, logprobs)
        state.how.drew(len(tokens))
        state.agreement = Agreement()

    def look_back(self, sequence: Sequence, gained: Tokens) -> None:
        """How right history would have been about what plain steps just gave: the newest tokens of
        the sequence.
        """
        if self.switch.forced is not None:
            return
        wanted = gained[:LOOK_BACK].tolist()
        start = sequence.length - len(gained)
        guessed = self._ask(sequence, start, len(wanted))
        right = accepted([*guessed.tokens, -1], wanted, ())[0] - 1
        self.switch.found.add(1, bool(guessed.tokens))
        if guessed.tokens:
            self.switch.right.add(len(guessed.tokens), right)
            self.chances.add(guessed.matched, len(guessed.tokens), right)

    def tell(self, sequence: Sequence) -> None:
        """Siblings may draft from what this row has, unless all of it was drafted."""
        state = self.states[sequence]
        fresh = sequence.length - state.told
        if fresh and state.has_news:
            begin = max(0, state.told - self.source.context)
            known = sequence.tokens[begin : sequence.length]
            self.source.grown(state.prompt, sequence.request.group, known, fresh)
        state.told, state.has_news = sequence.length, False

    def _lengths(self, rows: Many[Sequence], drafts: Many[Many[int]]) -> list[int]:
        """How much of each row's draft pays."""
        longest = [len(draft) for draft in drafts]
        if self.switch.forced or not any(longest):
            return longest
        rated = [
            Row(length, 0.0, self.chances.odds(self.states[sequence].agreement.known))
            for sequence, length in zip(rows, longest, strict=True)
        ]
        cost = self.switch.passes.cost()
        return levelled(rated, draft_lengths(rated, cost), cost)

    def _draft(self, sequence: Sequence) -> Many[int]:
        """What its window and the rest of its length leave of what may come."""
        state = self.states[sequence]
        most = min(state.window, sequence.limit - sequence.length - 1)
        if most <= 0:
            return ()
        draft = self._ask(sequence, sequence.length, most)
        coming = state.agreement.looked_up(draft, self.source.context)[:most]
        state.how.looked_up(bool(draft.tokens))
        self.counts["asked"] += 1
        self.counts["found"] += bool(draft.tokens)
        self.switch.found.add(1, bool(coming))
        return coming

    def _ask(self, sequence: Sequence, end: int, most: int) -> Draft:
        """What may follow the sequence's first `end` tokens, up to the first that is no token of
        this model: another model's history, or torn memory.
        """
        newest = sequence.tokens[max(0, end - self.source.context) : end].tolist()
        draft = self.source.draft(self.states[sequence].prompt, newest, most)
        if draft.tokens and max(draft.tokens) >= self.vocabulary:
            kept = list(takewhile(lambda token: token < self.vocabulary, draft.tokens))
            return Draft(kept, draft.matched) if kept else NOTHING
        return draft
