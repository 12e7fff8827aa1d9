"""Speculative decoding changes how fast an engine generates tokens, never their distribution:
drafts come from the history of earlier answers, and the model verifies each drafted token.

The engine calls `Speculation` with the rows to draft for and with the result of each pass.
`Speculation` learns from verified drafts how likely the next drafts are to be accepted, and adds
running sequences to the history, so that samples of the same group can draft from them.
`DraftsBuilder` counts the statistics of one sequence, as a `Drafts` record per emission.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.index import NO_DRAFT, Draft, DraftSource
from rollstream.producers.drafts.planner import (
    AcceptanceCurve,
    DraftRow,
    HistoryAgreement,
    draft_lengths,
    level_lengths,
)
from rollstream.producers.engines.base import DraftStats
from rollstream.streams.values import Drafts, extend_runs


@dataclass(slots=True)
class DraftsBuilder:
    """The fields of a `Drafts` record, counted since the last emission. Tokens must be added in the
    order of generation.
    """

    runs: list[int] = field(default_factory=lambda: [0])
    steps: int = 0
    guessed: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def add_drawn(self, count: int) -> None:
        """Add `count` tokens that the model drew, one per step."""
        extend_runs(self.runs, count, guessed=False)
        self.steps += count

    def add_pass(self, drafted: int, accepted: int, gained: int) -> None:
        """Add a pass that verified a draft of `drafted` tokens and gave `gained` tokens, the first
        `accepted` of them from the draft.
        """
        extend_runs(self.runs, accepted, guessed=True)
        extend_runs(self.runs, gained - accepted, guessed=False)
        self.steps += 1
        self.guessed += drafted

    def add_lookup(self, found: bool) -> None:
        """Add a look-up for a draft."""
        self.asked += 1
        self.found += found

    def take(self) -> Drafts:
        """Return the record and reset all counts."""
        record = Drafts(
            tuple(self.runs), self.steps, self.guessed, self.asked, self.found, self.lookup_s
        )
        self.runs = [0]
        self.steps = self.guessed = self.asked = self.found = 0
        self.lookup_s = 0.0
        return record


SHARE_TOKENS_MIN = 32  # new tokens of a running sequence before it is added to the history again


@dataclass(slots=True)
class DraftedSequence:
    """A sequence of the batch; `prompt` and `group` are its keys in the history. `window` is the
    longest draft that the sequence gets. The history holds its first `shared` tokens.
    `has_new_tokens`: at least one later token was not drafted.
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
    """Drafts and their statistics of one engine; the model's tokens are below `vocabulary`."""

    source: DraftSource
    gate: DraftGate
    vocabulary: int
    clock: Callable[[], float] = time.perf_counter
    acceptance: AcceptanceCurve = field(init=False)
    counts: Counter[str] = field(default_factory=Counter[str], init=False)
    """The integers of `DraftStats` by name."""
    lookup_s: float = field(default=0.0, init=False)
    undecided_steps: int = field(default=0, init=False)
    """Steps since the last decision of the gate, which was made for `decided_rows`."""
    decided_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceCurve(self.gate.rule.most)

    def stats(self) -> DraftStats:
        return DraftStats(**self.counts, lookup_s=self.lookup_s)

    def decide(self, rows: int, drafts: bool, steps: int = 1) -> bool:
        """Returns whether to draft in the next steps; the gate decides every few steps. `drafts` is
        whether the engine drafts now; `steps` counts steps since the last call.
        """
        if rows != self.decided_rows or self.undecided_steps >= self.gate.steps_to_decision:
            self.decided_rows, self.undecided_steps = rows, 0
            self.counts["changes"] += self.gate.decide(rows, self.clock()) != drafts
            drafts = self.gate.on
        self.undecided_steps += steps
        return drafts

    def look_up(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """Look up a draft, cut before the first token outside of the model's vocabulary: shared
        memory may be torn, or hold the history of another model.
        """
        draft = self.source.draft(prompt, newest, most)
        if not draft.tokens or max(draft.tokens) < self.vocabulary:
            return draft
        kept = list(takewhile(lambda token: token < self.vocabulary, draft.tokens))
        return Draft(kept, draft.matched) if kept else NO_DRAFT

    def propose(self, row: DraftedSequence, newest: Sequence[int], most: int) -> list[int]:
        """Returns the tokens that may be drafted for this row; `choose_lengths` shortens them."""
        draft = self.look_up(row.prompt, newest, most)
        proposed = list(row.agreement.start_draft(draft, self.source.context)[:most])
        row.statistics.add_lookup(bool(draft.tokens))
        self.counts["asked"] += 1
        self.counts["found"] += bool(draft.tokens)
        self.gate.hit_rate.add(1, bool(proposed))
        return proposed

    def choose_lengths(
        self, rows: Sequence[DraftedSequence], longest: list[int], *, is_padded: bool = False
    ) -> list[int]:
        """Returns the fastest draft length of each row, at most `longest`. With `is_padded` every
        row of a pass takes as many places as the longest draft.
        """
        if self.gate.forced or not any(longest):
            return longest
        known = [self.acceptance.odds(row.agreement.known) for row in rows]
        rated = [DraftRow(length, 0.0, odds) for length, odds in zip(longest, known, strict=True)]
        cost = self.gate.pass_cost(len(rows))
        lengths = draft_lengths(rated, cost)
        return level_lengths(rated, lengths, cost) if is_padded else lengths

    def add_lookup_time(self, rows: Sequence[DraftedSequence], seconds: float) -> None:
        """Record look-ups that took `seconds` for all of these rows together."""
        self.lookup_s += seconds
        for row in rows:
            row.statistics.lookup_s += seconds / len(rows)

    def add_verified(
        self, row: DraftedSequence, draft: Sequence[int], gained: Sequence[int]
    ) -> None:
        """Record that a pass with this draft gave the tokens `gained`: the accepted ones, then one
        that the model drew, unless an accepted token ended the sequence.
        """
        drafted = verified = len(draft)
        accepted = len(gained) - 1
        if accepted < drafted and gained[-1] == draft[accepted]:
            # The last token was drafted too and ended the sequence; the rest was not verified.
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

    def look_up_trial(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """Look up a draft that is not verified but passed to `add_trial` later."""
        draft = self.look_up(prompt, newest, most)
        self.gate.hit_rate.add(1, bool(draft.tokens))
        return draft

    def add_trial(self, draft: Draft, came: Sequence[int]) -> None:
        """Record how many tokens of a draft of `look_up_trial` equal the tokens generated since."""
        if draft.tokens:
            pairs = zip(draft.tokens, came, strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.gate.acceptance_rate.add(len(draft.tokens), equal)
            self.acceptance.add(draft.matched, len(draft.tokens), equal)

    def share_tokens(
        self, row: DraftedSequence, tokens: NDArray[np.integer], least: int = SHARE_TOKENS_MIN
    ) -> None:
        """Add the row's new tokens to the history, so that siblings can draft from them. Does
        nothing while fewer than `least` tokens are new, and nothing if all of them were drafted.
        """
        fresh = len(tokens) - row.shared
        if fresh < least:
            return
        if fresh and row.has_new_tokens:
            known = tokens[max(0, row.shared - self.source.context) :].astype(np.uint32, copy=False)
            self.source.add_running(row.prompt, row.group, known, fresh)
        row.shared, row.has_new_tokens = len(tokens), False
