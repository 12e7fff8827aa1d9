"""Speculative decoding, the part that all engines share: it finds drafts in the history (earlier
answers to the same prompt), chooses their lengths, and counts the accepted tokens.

The model verifies all drafts of a batch in one forward pass, so drafts change how fast an engine
generates tokens, never their distribution. `Speculation` is the state of one engine; it holds the
gate, which turns drafting off while it costs time. Each row of the batch is a `DraftedSequence`,
whose `DraftsBuilder` counts the statistics that the engine emits with the tokens (`Drafts`).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.drafting import NO_DRAFT, Draft, DraftSource
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
    """Counts the fields of a `Drafts` value for the tokens that one sequence gained since the last
    `take`. Tokens must be added in the order of generation.

    `runs` are lengths of alternating kinds: tokens that the model drew itself, accepted draft
    tokens, drawn ones, and so on. `steps` counts passes, `guessed` draft tokens, `asked` look-ups;
    `found` of these gave a draft, and all took `lookup_s` seconds.
    """

    runs: list[int] = field(default_factory=lambda: [0])
    steps: int = 0
    guessed: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def add_drawn(self, count: int) -> None:
        """Add `count` tokens that the model drew without a draft, one in each step."""
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
        """Add a look-up, which gave a draft if `found`."""
        self.asked += 1
        self.found += found

    def take(self) -> Drafts:
        """Returns the counts and reset them."""
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
    """Keeps the draft state of one row of the batch; `prompt` and `group` are its keys in the
    history.

    The row's next draft has at most `window` tokens. Only the tokens after the first `shared` ones
    are still to be added to the history; `has_new_tokens` is False if these are known to repeat it,
    because every draft since was accepted whole. `agreement` tracks how many of the newest tokens
    are known to agree with the history.
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
    """Drafts for the rows of one engine, and counts the results. `source` looks drafts up, `gate`
    decides whether to draft; the model's tokens are below `vocabulary`.

    While drafting is on, the engine calls `propose` for each row, `choose_lengths` for the batch,
    and after the pass `add_verified` for each row, whose results decide the next lengths. While
    drafting is off, trial drafts (`look_up_trial`, `add_trial`) show how many drafted tokens would
    be accepted. `share_tokens` adds running sequences to the history, so that the other samples of
    the group can draft from them.
    """

    source: DraftSource
    gate: DraftGate
    vocabulary: int
    clock: Callable[[], float] = time.perf_counter
    acceptance: AcceptanceCurve = field(init=False)
    """Learns the acceptance probability of a drafted token."""
    counts: Counter[str] = field(default_factory=Counter[str], init=False)
    """The integers of `DraftStats` by name."""
    lookup_s: float = field(default=0.0, init=False)
    undecided_steps: int = field(default=0, init=False)
    """Steps since the last decision of the gate, which was made for `decided_rows` rows."""
    decided_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceCurve(self.gate.rule.most)

    def stats(self) -> DraftStats:
        return DraftStats(**self.counts, lookup_s=self.lookup_s)

    def decide(self, rows: int, drafts: bool, steps: int = 1) -> bool:
        """Returns whether to draft in the next steps over this number of rows. The gate decides
        again every few steps and when the number of rows changes; until then the answer is
        `drafts`, which states whether the engine drafts now. `steps` is the number of steps from
        one call to the next.
        """
        if rows != self.decided_rows or self.undecided_steps >= self.gate.steps_to_decision:
            self.decided_rows, self.undecided_steps = rows, 0
            self.counts["changes"] += self.gate.decide(rows, self.clock()) != drafts
            drafts = self.gate.on
        self.undecided_steps += steps
        return drafts

    def look_up(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """Returns a draft of at most `most` tokens that may follow the `newest` ones. It is cut
        before the first token outside of the model's vocabulary: the history is in shared memory,
        to which another process may be writing, and which another model may have filled.
        """
        draft = self.source.draft(prompt, newest, most)
        if not draft.tokens or max(draft.tokens) < self.vocabulary:
            return draft
        kept = list(takewhile(lambda token: token < self.vocabulary, draft.tokens))
        return Draft(kept, draft.matched) if kept else NO_DRAFT

    def propose(self, row: DraftedSequence, newest: Sequence[int], most: int) -> list[int]:
        """Returns at most `most` tokens that may be drafted for this row after its `newest` tokens;
        `choose_lengths` then shortens the draft.
        """
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
        """Returns, for each row, the draft length at which the whole batch is fastest, at most
        `longest`. With `is_padded` every row of a pass takes as many places as the longest draft,
        and the padding counts as a cost. A `forced` gate leaves all drafts at `longest`.
        """
        if self.gate.forced or not any(longest):
            return longest
        known = [self.acceptance.odds(row.agreement.known) for row in rows]
        rated = [DraftRow(length, 0.0, odds) for length, odds in zip(longest, known, strict=True)]
        cost = self.gate.pass_cost(len(rows))
        lengths = draft_lengths(rated, cost)
        return level_lengths(rated, lengths, cost) if is_padded else lengths

    def add_lookup_time(self, rows: Sequence[DraftedSequence], seconds: float) -> None:
        """Count look-ups that took `seconds` for all of these rows together, in equal shares."""
        self.lookup_s += seconds
        for row in rows:
            row.statistics.lookup_s += seconds / len(rows)

    def add_verified(
        self, row: DraftedSequence, draft: Sequence[int], gained: Sequence[int]
    ) -> None:
        """Record that a pass with this draft, perhaps empty, gave the tokens `gained`: the accepted
        draft tokens, then one that the model drew, unless an accepted token ended the sequence.
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

    def look_up_trial(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """Look up a trial draft: the model does not verify it, and `add_trial` compares it later
        with the tokens that plain steps generate.
        """
        draft = self.look_up(prompt, newest, most)
        self.gate.hit_rate.add(1, bool(draft.tokens))
        return draft

    def add_trial(self, draft: Draft, came: Sequence[int]) -> None:
        """Record how many tokens at the begin of a trial draft equal the tokens `came`, which were
        generated since.
        """
        if draft.tokens:
            pairs = zip(draft.tokens, came, strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.gate.acceptance_rate.add(len(draft.tokens), equal)
            self.acceptance.add(draft.matched, len(draft.tokens), equal)

    def share_tokens(
        self, row: DraftedSequence, tokens: NDArray[np.integer], least: int = SHARE_TOKENS_MIN
    ) -> None:
        """Add the row's new tokens to the history, so that the other samples of its group can draft
        from them. `tokens` are all tokens of the sequence. Does nothing while fewer than `least`
        are new, and adds none if they repeat the history (`has_new_tokens` False).
        """
        fresh = len(tokens) - row.shared
        if fresh < least:
            return
        if fresh and row.has_new_tokens:
            known = tokens[max(0, row.shared - self.source.context) :].astype(np.uint32, copy=False)
            self.source.add_running(row.prompt, row.group, known, fresh)
        row.shared, row.has_new_tokens = len(tokens), False
