"""What drafts came to, in all and by request: numbers in a little memory that vLLM's worker adds to
and the rollout reads, whichever process each is in. A question would wait for the end of a step.

A place is one stay's at a time, and its numbers only grow: who takes the differences counts nothing
twice and loses nothing. What a step came to is there before the rollout hears of its tokens.
"""

import mmap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields

from producers.engines.base import DraftStats
from producers.engines.drafts.unsaid import Unsaid
from producers.engines.vllm_engine.staging import open_shared, shared_path
from streams.drafted import right_of
from streams.records import Drafts

_ALL, _EACH = len(fields(DraftStats)), 6  # words; the first of a place says whose it is


class Tally:
    """In a mapped file, of which only one process writes the words."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def write(self, stats: DraftStats) -> None:
        """All of it, anew."""
        for at, number in enumerate(astuple(stats)):
            self._words[at] = number

    def stats(self) -> DraftStats:
        *counts, lookup_s = self._words[:_ALL].tolist()
        return DraftStats(*map(int, counts), lookup_s=lookup_s)

    def add(self, place: int, stay: int, drafts: Drafts) -> None:
        """More of this stay, which has the place from here on."""
        words, at = self._words, _ALL + place * _EACH
        if words[at] != stay:
            for other in range(at + 1, at + _EACH):
                words[other] = 0
            words[at] = stay
        words[at + 1] += right_of(drafts)
        words[at + 2] += drafts.guessed
        words[at + 3] += drafts.asked
        words[at + 4] += drafts.found
        words[at + 5] += drafts.lookup_s

    def of(self, place: int, stay: int) -> list[float]:
        """Right tokens, guessed ones, look-ups, those that found something, and their seconds."""
        at = _ALL + place * _EACH
        whose, *numbers = map(float, self._words[at : at + _EACH])
        return numbers if whose == stay else [0.0] * len(numbers)


@contextmanager
def new_tally(places: int) -> Generator[tuple[Tally, str]]:
    """All zero, and the path at which the other process maps it while this lasts."""
    with open_shared("rollstream-tally") as file:
        file.write(bytes(8 * (_ALL + places * _EACH)))
        file.flush()
        yield Tally(shared_path(file)), shared_path(file)


@dataclass(slots=True)
class Marks:
    """Of the tokens of one stay in vLLM: which had been guessed, and what that took."""

    tally: Tally
    place: int
    stay: int
    right: int = 0
    how: Unsaid = field(default_factory=Unsaid)
    told: list[float] = field(default_factory=lambda: [0.0] * (_EACH - 1))

    def gained(self, count: int, ended: bool) -> None:
        """What one step gave: tokens of its draft, and behind them one that the model drew, unless
        a guessed one ended the stay; only the worker knows whether it was.
        """
        right = count - 1
        if ended:
            right = min(max(right, int(self._tallied()[0]) - self.right), count)
        self.right += right
        self.how.verified(0, right, count)

    def say(self) -> Drafts:
        """All that was not said yet. The worker may have gone on meanwhile: what it counted of
        tokens that are still to come is said with these.
        """
        now = self._tallied()
        _, guessed, asked, found, seconds = (a - b for a, b in zip(now, self.told, strict=True))
        self.told = now
        self.how.guessed, self.how.asked, self.how.found = int(guessed), int(asked), int(found)
        self.how.lookup_s = seconds
        return self.how.say()

    def _tallied(self) -> list[float]:
        return self.tally.of(self.place, self.stay)
