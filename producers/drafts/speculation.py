"""Speculative decoding: the model verifies all drafts of a batch in one forward pass, so drafts
change speed, never the distribution of tokens.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.planner import (
    AcceptanceCurve,
    DraftRow,
    HistoryAgreement,
    draft_lengths,
    level_lengths,
)
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.drafting import NO_DRAFT, Draft, DraftSource
from rollstream.streams.values import Drafts, extend_runs


@dataclass(slots=True)
class DraftsBuilder:
    """Counts since the last `take`. `runs` are lengths of alternating kinds: tokens that the model
    drew itself, accepted draft tokens, drawn ones, and so on.
    """

    runs: list[int] = field(default_factory=lambda: [0])
    steps: int = 0
    guessed: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def add_drawn(self, count: int) -> None:
        extend_runs(self.runs, count, guessed=False)
        self.steps += count

    def add_pass(self, drafted: int, accepted: int, gained: int) -> None:
        extend_runs(self.runs, accepted, guessed=True)
        extend_runs(self.runs, gained - accepted, guessed=False)
        self.steps += 1
        self.guessed += drafted

    def add_lookup(self, has_draft: bool) -> None:
        self.asked += 1
        self.found += has_draft

    def take(self) -> Drafts:
        record = Drafts(
            tuple(self.runs), self.steps, self.guessed, self.asked, self.found, self.lookup_s
        )
        self.runs = [0]
        self.steps = self.guessed = self.asked = self.found = 0
        self.lookup_s = 0.0
        return record


SHARE_TOKENS_MIN = 32  # least new tokens of a running sequence that are added to the history


@dataclass(slots=True)
class DraftedSequence:
    """One row's drafts. Tokens after the first `shared` ones are still to be added to the history;
    `has_new_tokens` is False if all are accepted drafts.
    """

    prompt: int
    group: int
    window: int
    shared: int
    has_new_tokens: bool = True
    agreement: HistoryAgreement = field(default_factory=HistoryAgreement)
    statistics: DraftsBuilder = field(default_factory=DraftsBuilder)


@dataclass
class Speculation:
    """Drafts for one engine. While on, the engine calls `propose` for each row, `choose_lengths`
    for the batch, and after the pass `add_verified` for each row. While off, trial drafts
    (`look_up_trial`, `add_trial`) show how many tokens would be accepted.
    """

    source: DraftSource
    gate: DraftGate
    vocabulary: int
    clock: Callable[[], float] = time.perf_counter
    acceptance: AcceptanceCurve = field(init=False)
    counts: Counter[str] = field(default_factory=Counter[str], init=False)
    lookup_s: float = field(default=0.0, init=False)
    undecided_steps: int = field(default=0, init=False)
    """Steps since the last decision of the gate, which was made for `decided_rows` rows."""
    decided_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceCurve(self.gate.rule.most)

    def stats(self) -> DraftStats:
        return DraftStats(**self.counts, lookup_s=self.lookup_s)

    def decide(self, rows: int, drafts: bool, steps: int = 1) -> bool:
        """Returns whether to draft in the next steps. `drafts`: whether the engine drafts now;
        `steps`: from one call to the next.
        """
        if rows != self.decided_rows or self.undecided_steps >= self.gate.steps_to_decision:
            self.decided_rows, self.undecided_steps = rows, 0
            self.counts["changes"] += self.gate.decide(rows, self.clock()) != drafts
            drafts = self.gate.on
        self.undecided_steps += steps
        return drafts

    def look_up(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
        draft = self.source.draft(prompt, newest, tokens_max)
        if not draft.tokens or max(draft.tokens) < self.vocabulary:
            return draft
        # Another process may be writing the shared memory, or another model may have filled it.
        tokens = list(takewhile(lambda token: token < self.vocabulary, draft.tokens))
        return Draft(tokens, draft.matched) if tokens else NO_DRAFT

    def propose(self, row: DraftedSequence, newest: Sequence[int], tokens_max: int) -> list[int]:
        """Returns at most `tokens_max` tokens, of which `choose_lengths` may take fewer."""
        draft = self.look_up(row.prompt, newest, tokens_max)
        proposed = list(row.agreement.start_draft(draft, self.source.context)[:tokens_max])
        row.statistics.add_lookup(bool(draft.tokens))
        self.counts["asked"] += 1
        self.counts["found"] += bool(draft.tokens)
        self.gate.hit_rate.add(1, bool(proposed))
        return proposed

    def choose_lengths(
        self, rows: Sequence[DraftedSequence], longest: list[int], *, is_padded: bool = False
    ) -> list[int]:
        """Returns the fastest draft length of each row. With `is_padded` every row takes as many
        places as the longest draft.
        """
        if self.gate.forced or not any(longest):
            return longest
        row_odds = [self.acceptance.odds(row.agreement.known) for row in rows]
        rated = [
            DraftRow(length, 0.0, odds) for length, odds in zip(longest, row_odds, strict=True)
        ]
        cost = self.gate.pass_cost(len(rows))
        lengths = draft_lengths(rated, cost)
        return level_lengths(rated, lengths, cost) if is_padded else lengths

    def add_lookup_time(self, rows: Sequence[DraftedSequence], seconds: float) -> None:
        self.lookup_s += seconds
        for row in rows:
            row.statistics.lookup_s += seconds / len(rows)

    def add_verified(
        self, row: DraftedSequence, draft: Sequence[int], gained: Sequence[int]
    ) -> None:
        """Record the tokens `gained`: the accepted draft tokens, then one that the model drew,
        unless an accepted one ended the sequence.
        """
        drafted = verified = len(draft)
        accepted = len(gained) - 1
        if accepted < drafted and gained[-1] == draft[accepted]:
            # The last token is an accepted one, which ended the sequence: the drafted tokens after
            # it were not verified.
            accepted += 1
            verified = accepted
        if draft:
            row.window = self.gate.rule.after(row.window, verified, accepted)
            self.acceptance.add(row.agreement.known, verified, accepted)
            self.gate.acceptance_rate.add(verified, accepted)
        row.agreement.end_draft(verified, accepted)
        row.statistics.add_pass(drafted, accepted, len(gained))
        row.has_new_tokens |= accepted == 0 or accepted < verified
        self.counts["proposed"] += drafted
        self.counts["accepted"] += accepted

    def look_up_trial(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
        """Returns a draft that the model does not verify; `add_trial` compares it later."""
        draft = self.look_up(prompt, newest, tokens_max)
        self.gate.hit_rate.add(1, bool(draft.tokens))
        return draft

    def add_trial(self, draft: Draft, came: Sequence[int]) -> None:
        if draft.tokens:
            pairs = zip(draft.tokens, came, strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.gate.acceptance_rate.add(len(draft.tokens), equal)
            self.acceptance.add(draft.matched, len(draft.tokens), equal)

    def share_tokens(
        self, row: DraftedSequence, tokens: NDArray[np.integer], fresh_min: int = SHARE_TOKENS_MIN
    ) -> None:
        """Add the row's new tokens to the history; does nothing while fewer than `fresh_min` are
        new. `tokens` are all of the sequence.
        """
        fresh = len(tokens) - row.shared
        if fresh < fresh_min:
            return
        if fresh and row.has_new_tokens:
            shared_tokens = tokens[max(0, row.shared - self.source.context) :].astype(
                np.uint32, copy=False
            )
            self.source.add_running(row.prompt, row.group, shared_tokens, fresh)
        row.shared, row.has_new_tokens = len(tokens), False
