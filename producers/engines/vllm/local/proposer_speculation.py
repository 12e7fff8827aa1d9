"""Decides after each step of vLLM which rows draft how many tokens. Runs in vLLM's worker, perhaps
another process, and writes its counts to shared memory (docs/explanation/drafts.md).
"""

import mmap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.planner import HistoryAgreement
from rollstream.producers.drafts.speculation import DraftedSequence, DraftsBuilder, Speculation
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.drafting import NO_DRAFT, Draft
from rollstream.storage.weights.streamed import open_nameless, path_of_open_file
from rollstream.streams.values import Drafts, accepted_tokens

_ALL, _EACH = len(fields(DraftStats)), 6  # numbers of the totals, and of one place


class DraftCounters:
    """The file, which only vLLM's worker writes, has the totals (`DraftStats`), then places, each
    with the number of one stay (one request to vLLM) and five counts. These only grow while the
    stay lasts, so differences count each event exactly once.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def write(self, stats: DraftStats) -> None:
        for at, number in enumerate(astuple(stats)):
            self._words[at] = number

    def stats(self) -> DraftStats:
        *counts, lookup_s = self._words[:_ALL].tolist()
        return DraftStats(*map(int, counts), lookup_s=lookup_s)

    def add(self, place: int, stay: int, drafts: Drafts) -> None:
        """Add counts to those of this stay; another stay's counts in the place are dropped."""
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
        """Returns accepted tokens, drafted tokens, look-ups, drafts found, look-up seconds; 0 if
        the place has none of this stay.
        """
        at = _ALL + place * _EACH
        whose, *numbers = map(float, self._words[at : at + _EACH])
        return numbers if whose == stay else [0.0] * len(numbers)


@contextmanager
def open_draft_counters(places: int) -> Generator[tuple[DraftCounters, str]]:
    """Creates counters, all zero, and yields them with the path at which another process can map
    them while the context is open.
    """
    with open_nameless("rollstream-tally", in_memory=True) as file:
        file.write(bytes(8 * (_ALL + places * _EACH)))
        file.flush()
        yield DraftCounters(path_of_open_file(file)), path_of_open_file(file)


@dataclass(slots=True)
class StayDrafts:
    counters: DraftCounters
    place: int
    stay: int
    accepted: int = 0
    statistics: DraftsBuilder = field(default_factory=DraftsBuilder)
    reported: list[float] = field(default_factory=lambda: [0.0] * (_EACH - 1))

    def gained(self, count: int, ended: bool) -> None:
        # The last token is the model's own, unless an accepted token ended the stay, which the
        # worker's count shows.
        accepted = count - 1
        if ended:
            accepted = min(max(accepted, int(self._counted()[0]) - self.accepted), count)
        self.accepted += accepted
        self.statistics.add_pass(0, accepted, count)

    def take(self) -> Drafts:
        # A worker a step ahead counts drafts for tokens that have not arrived yet.
        now = self._counted()
        _, guessed, lookups, hits, seconds = (
            a - b for a, b in zip(now, self.reported, strict=True)
        )
        self.reported = now
        self.statistics.guessed, self.statistics.asked, self.statistics.found = (
            int(guessed),
            int(lookups),
            int(hits),
        )
        self.statistics.lookup_s = seconds
        return self.statistics.take()

    def _counted(self) -> list[float]:
        return self.counters.of(self.place, self.stay)


TRIAL_EVERY_TOKENS = 16  # tokens of a row from one trial draft to the next (`_trial`)
TRIAL_TOKENS = 8  # length of a trial draft
IDLE_STEPS = 8  # while drafting is off, `step` is called at every eighth step only (`can_skip`)


@dataclass(frozen=True, slots=True)
class SteppedRequest:
    """It has `tokens` in all and may generate `room` more. The counts of its `stay` are written to
    `place`.
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
    # The newest trial draft, looked up when the row had `tried_at` tokens (`_trial`).
    tried: Draft = NO_DRAFT
    tried_at: int = -TRIAL_EVERY_TOKENS


@dataclass
class ProposerSpeculation(Speculation):
    counters: DraftCounters | None = None
    _rows: dict[str, _ProposerRow] = field(default_factory=dict[str, _ProposerRow], init=False)
    """Draft states of the batch at the last call of `step`, by request."""
    _began: float | None = field(default=None, init=False)
    _steps: int = field(default=1, init=False)
    """Steps of vLLM since that call, if the next one is not skipped."""

    def can_skip(self, keys: Sequence[str]) -> bool:
        """Returns whether drafting is off, the batch is that of the last call, and few steps were
        left out since.
        """
        is_awake = self.gate.on or self.gate.probing
        if is_awake or self._steps >= IDLE_STEPS or list(keys) != list(self._rows):
            return False
        self._steps += 1
        return True

    def step(self, batch: Sequence[SteppedRequest]) -> list[list[int]]:
        """Returns the drafts for the next step, some or all of them empty.

        1. Record which drafted tokens were accepted. 2. Record the time of the step. 3. Decide
        whether to draft. 4. Make the next drafts, or trial drafts. 5. Write the counts.
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
        guessed = sum(len(seen.draft) for seen, _ in rows)
        gained = sum(len(seen.gained) for seen, _ in rows)
        if guessed:
            self.counts.update(passes=1, rows=len(rows), gained=gained)
        # Prompts were prefilled, or the batch changed: the time means nothing.
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
        longest: list[list[int]] = []
        for seen, row in rows:
            # The model samples one more token after the accepted ones.
            tokens_max = min(row.window, seen.room - 1)
            longest.append(
                self.propose(row, self._newest(seen), tokens_max) if tokens_max > 0 else []
            )
        # vLLM packs a step's tokens without padding, so lengths need not be equal.
        lengths = self.choose_lengths([row for _, row in rows], [len(draft) for draft in longest])
        cut = zip(rows, longest, lengths, strict=True)
        return {seen.key: draft[:length] for (seen, _), draft, length in cut}

    def _trial(self, row: _ProposerRow, seen: SteppedRequest) -> None:
        if len(seen.tokens) - row.tried_at >= TRIAL_EVERY_TOKENS:
            self.add_trial(row.tried, seen.tokens[row.tried_at :].tolist())
            # Looked up before the tokens exist: a history that already contains them would appear
            # to have predicted them.
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
