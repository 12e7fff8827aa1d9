"""Draft statistics in shared memory, in total and by request: vLLM's worker adds to them and the
rollout reads them, in the same or in another process. A call to the worker would wait for the end
of a step.

A place belongs to one stay at a time, and its numbers only grow, so a reader that takes differences
counts nothing twice and loses nothing. The counts of a step are written before the rollout gets its
tokens.
"""

import mmap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields

from rollstream.producers.engines.base import DraftStats
from rollstream.producers.drafts.unsaid import DraftsBuilder
from rollstream.producers.engines.vllm.staging import open_shared, shared_path
from rollstream.streams.draft_runs import accepted_tokens
from rollstream.streams.values import Drafts

_ALL, _EACH = len(fields(DraftStats)), 6  # words; the first word of a place is its stay


class DraftCounters:
    """The counters in a mapped file, which only one process writes."""

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
        """Counts of a stay: accepted tokens, drafted ones, look-ups, drafts found, look-up
        seconds.
        """
        at = _ALL + place * _EACH
        whose, *numbers = map(float, self._words[at : at + _EACH])
        return numbers if whose == stay else [0.0] * len(numbers)


@contextmanager
def open_draft_counters(places: int) -> Generator[tuple[DraftCounters, str]]:
    """New counters, all zero, and the path at which another process can map them during the
    context.
    """
    with open_shared("rollstream-tally") as file:
        file.write(bytes(8 * (_ALL + places * _EACH)))
        file.flush()
        yield DraftCounters(shared_path(file)), shared_path(file)


@dataclass(slots=True)
class StayDrafts:
    """Draft statistics of one stay in vLLM: which tokens were drafted, and the look-ups."""

    tally: DraftCounters
    place: int
    stay: int
    right: int = 0
    how: DraftsBuilder = field(default_factory=DraftsBuilder)
    told: list[float] = field(default_factory=lambda: [0.0] * (_EACH - 1))

    def gained(self, count: int, ended: bool) -> None:
        """Add the tokens of one step: accepted ones, and after them one that the model drew, unless
        an accepted one ended the stay, which only the worker's counts show.
        """
        right = count - 1
        if ended:
            right = min(max(right, int(self._tallied()[0]) - self.right), count)
        self.right += right
        self.how.verified(0, right, count)

    def say(self) -> Drafts:
        """The statistics since the last call. The worker may be ahead: its counts for tokens that
        have not arrived yet are included.
        """
        now = self._tallied()
        _, guessed, asked, found, seconds = (a - b for a, b in zip(now, self.told, strict=True))
        self.told = now
        self.how.guessed, self.how.asked, self.how.found = int(guessed), int(asked), int(found)
        self.how.lookup_s = seconds
        return self.how.say()

    def _tallied(self) -> list[float]:
        return self.tally.of(self.place, self.stay)
