"""Decides after each step of vLLM which rows draft how many tokens (`ProposerSpeculation`), and
counts how many of these are accepted (`DraftCounters`).

vLLM's worker drafts and counts; the rollout reads the counts from shared memory, in the same or in
another process. docs/explanation/drafts.md (On vLLM) has the cases.
"""

import mmap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.index import NO_DRAFT, Draft
from rollstream.producers.drafts.planner import HistoryAgreement
from rollstream.producers.drafts.speculation import DraftedSequence, DraftsBuilder, Speculation
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.vllm.staging import open_shared
from rollstream.storage.weights.streamed import path_of_open_file
from rollstream.streams.values import Drafts, accepted_tokens

_ALL, _EACH = len(fields(DraftStats)), 6  # in words; a place begins with its stay


class DraftCounters:
    """Reads and writes the counters in a mapped file, which only one process writes: vLLM's worker.
    The rollout reads them there, because a call to the worker would wait for the end of a step.

    The counts are kept in total and for each stay (one request to vLLM, see `engine.py`). A stay
    has a place of its own in the file, where its numbers only grow, so a reader that takes
    differences counts each event exactly once. The counts of a step are written before the rollout
    gets its tokens.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def write(self, stats: DraftStats) -> None:
        """Replace the totals."""
        for at, number in enumerate(astuple(stats)):
            self._words[at] = number

    def stats(self) -> DraftStats:
        *counts, lookup_s = self._words[:_ALL].tolist()
        return DraftStats(*map(int, counts), lookup_s=lookup_s)

    def add(self, place: int, stay: int, drafts: Drafts) -> None:
        """Add counts to this stay, which owns the place from here on."""
        words, at = self._words, _ALL + place * _EACH
        if words[at] != stay:
            for other in range(at + 1, at + _EACH):
                words[other] = 0
            words[at] = stay
        words[at + 1] += accepted_tokens(drafts)
        words[at + 2] += drafts.guessed
        words[at + 3] += drafts.asked
        words[at + 4] += drafts.found
        words[at + 5] += drafts.lookup_s

    def of(self, place: int, stay: int) -> list[float]:
        """Return the counts of a stay: accepted tokens, drafted tokens, look-ups, drafts found,
        look-up seconds.
        """
        at = _ALL + place * _EACH
        whose, *numbers = map(float, self._words[at : at + _EACH])
        return numbers if whose == stay else [0.0] * len(numbers)


@contextmanager
def open_draft_counters(places: int) -> Generator[tuple[DraftCounters, str]]:
    """Create counters, all zero; yields them and the path at which another process can map them
    during the context.
    """
    with open_shared("rollstream-tally") as file:
        file.write(bytes(8 * (_ALL + places * _EACH)))
        file.flush()
        yield DraftCounters(path_of_open_file(file)), path_of_open_file(file)


@dataclass(slots=True)
class StayDrafts:
    """Collects the draft statistics of one stay in vLLM: the drafted tokens, and the look-ups."""

    counters: DraftCounters
    place: int
    stay: int
    accepted: int = 0
    statistics: DraftsBuilder = field(default_factory=DraftsBuilder)
    reported: list[float] = field(default_factory=lambda: [0.0] * (_EACH - 1))

    def gained(self, count: int, ended: bool) -> None:
        """Add the `count` tokens of one step: accepted ones, and after them one that the model
        drew. If an accepted token ended the stay, no drawn one follows; only the worker's counts
        show that case.
        """
        accepted = count - 1
        if ended:
            accepted = min(max(accepted, int(self._counted()[0]) - self.accepted), count)
        self.accepted += accepted
        self.statistics.add_pass(0, accepted, count)

    def take(self) -> Drafts:
        """Return the statistics since the last call. They include the worker's counts for tokens
        that have not arrived here yet.
        """
        now = self._counted()
        _, guessed, asked, found, seconds = (a - b for a, b in zip(now, self.reported, strict=True))
        self.reported = now
        self.statistics.guessed, self.statistics.asked, self.statistics.found = (
            int(guessed),
            int(asked),
            int(found),
        )
        self.statistics.lookup_s = seconds
        return self.statistics.take()

    def _counted(self) -> list[float]:
        return self.counters.of(self.place, self.stay)


TRIAL_EVERY_TOKENS = 16  # tokens of a row between two drafts that are only compared
TRIAL_TOKENS = 8
IDLE_STEPS = 8  # steps from one look at the batch to the next while there are no drafts


@dataclass(frozen=True, slots=True)
class SteppedRequest:
    """Describes a request after a step that verified `draft` and generated `gained` (empty while
    its prompt is being prefilled). It has `tokens` in all and may generate `room` more. Counts of
    its present `stay` are written to its `place`.
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
class _ProposerRow(DraftedSequence):
    """Holds the draft state of a row. `tried` is the draft of its present trial, looked up when the
    row had `tried_at` tokens.
    """

    tried: Draft = NO_DRAFT
    tried_at: int = -TRIAL_EVERY_TOKENS


@dataclass
class ProposerSpeculation(Speculation):
    """Makes the drafts of one engine; writes all counts to `counters` after each step.

    vLLM packs the tokens of a step without padding and takes a different number of them from each
    row, so drafts need not have equal lengths.
    """

    counters: DraftCounters | None = None
    _rows: dict[str, _ProposerRow] = field(default_factory=dict[str, _ProposerRow], init=False)
    _began: float | None = field(default=None, init=False)
    _steps: int = field(default=1, init=False)
    """Steps since the last look at the batch, plus one."""

    def can_skip(self, keys: Sequence[str]) -> bool:
        """Return whether `step` need not be called for these requests, to save time: the gate is
        off, and the batch is the same as at the last look.
        """
        is_awake = self.gate.on or self.gate.probing
        if is_awake or self._steps >= IDLE_STEPS or list(keys) != list(self._rows):
            return False
        self._steps += 1
        return True

    def step(self, batch: Sequence[SteppedRequest]) -> list[list[int]]:
        """Return the drafts for the next step, some or all of them empty.

        1. Record which drafted tokens were accepted.  2. Record the time of the step.  3. Decide
        whether to draft.  4. Make the next drafts.  5. Write the counts.
        """
        drafts: dict[str, list[int]] = {}
        began = self.clock()
        keys, steps, self._steps = [seen.key for seen in batch], self._steps, 1
        is_measured = all(seen.gained and seen.key in self._rows for seen in batch)
        is_measured &= steps == 1 or keys == list(self._rows)
        self._rows = {seen.key: self._rows.get(seen.key) or self._new_row(seen) for seen in batch}
        rows = [(seen, self._rows[seen.key]) for seen in batch if seen.gained]
        for seen, row in rows:  # 1
            self.add_verified(row, seen.draft, seen.gained)
            if not self.gate.on:
                row.agreement = HistoryAgreement()
        self._measure(rows, began, steps if is_measured else 0)  # 2
        if self.decide(len(rows), self.gate.on, steps):  # 3
            for seen, row in rows:  # 4
                self.share_tokens(row, seen.tokens)
            drafts = self._make_drafts(rows)
        elif self.gate.forced is None:
            for seen, row in rows:
                self._trial(row, seen)
        self.add_lookup_time(list(self._rows.values()), self.clock() - began)
        self._began = began
        self._write_counts(batch)  # 5
        return [drafts.get(seen.key, []) for seen in batch]

    def _new_row(self, seen: SteppedRequest) -> _ProposerRow:
        before = len(seen.tokens) - len(seen.gained)
        return _ProposerRow(seen.prompt, seen.group, self.gate.rule.least, before)

    def _measure(
        self, rows: Sequence[tuple[SteppedRequest, _ProposerRow]], began: float, steps: int
    ) -> None:
        """Record the time of `steps` steps; with 0 it is not recorded, because prompts were
        prefilled or the batch changed.
        """
        guessed = sum(len(seen.draft) for seen, _ in rows)
        gained = sum(len(seen.gained) for seen, _ in rows)
        if guessed:
            self.counts.update(passes=1, rows=len(rows), gained=gained)
        if not rows or not steps or self._began is None:
            return
        seconds = (began - self._began) / steps
        if self.gate.on:
            self.gate.add_pass(len(rows), len(rows) + guessed, gained, seconds)
        if not guessed:  # without drafts a step is a plain one, also with the gate on
            self.gate.add_plain_steps(len(rows), seconds)

    def _make_drafts(
        self, rows: Sequence[tuple[SteppedRequest, _ProposerRow]]
    ) -> dict[str, list[int]]:
        """Return drafts of the lengths that save time; no draft contains the last token that its
        request may generate.
        """
        longest: list[list[int]] = []
        for seen, row in rows:
            most = min(row.window, seen.room - 1)
            longest.append(self.propose(row, self._newest(seen), most) if most > 0 else [])
        lengths = self.choose_lengths([row for _, row in rows], [len(draft) for draft in longest])
        cut = zip(rows, longest, lengths, strict=True)
        return {seen.key: draft[:length] for (seen, _), draft, length in cut}

    def _trial(self, row: _ProposerRow, seen: SteppedRequest) -> None:
        """Compare the last trial draft with the tokens generated since; look up the next one.

        Trials are made while the gate is off. The draft is looked up before the tokens exist:
        otherwise a history that already contains these tokens would appear to have predicted them.
        """
        if len(seen.tokens) - row.tried_at >= TRIAL_EVERY_TOKENS:
            self.add_trial(row.tried, seen.tokens[row.tried_at :].tolist())
            row.tried = self.look_up_trial(row.prompt, self._newest(seen), TRIAL_TOKENS)
            row.tried_at = len(seen.tokens)

    def _write_counts(self, batch: Sequence[SteppedRequest]) -> None:
        counts = [self._rows[seen.key].statistics.take() for seen in batch]
        if self.counters is not None:
            for seen, drafts in zip(batch, counts, strict=True):
                self.counters.add(seen.place, seen.stay, drafts)
            self.counters.write(self.stats())

    def _newest(self, seen: SteppedRequest) -> list[int]:
        return seen.tokens[-self.source.context :].tolist()
