"""Earlier answers by prompt: the newest ones that fit, and for any few tokens what came after them.

Tokens lie in one ring, so memory is bounded and the oldest sequences go first. For each position
the 3 … 7 tokens before it (RhymeRL, arXiv 2508.18588) are a key of a table that points to the best
place to copy from. Which occurrence is best is `choice`: `priority` (the highest rank: later
passes over the prompt first, then the higher reward), `newest`, or `count` (a majority vote over
what came next, Boyer and Moore 1981). Following the highest priority at every branch is copying
from the sequence that has it, so a draft is one slice.

One thread writes. Another may draft meanwhile: what it reads may be torn, and is verified anyway.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from producers.engines.drafts.ngrams import Keys, keys_at, keys_of
from producers.engines.drafts.source import NOTHING, Draft
from producers.engines.drafts.table import ENTRY_BYTES, Places, Ranks, Table, table_slots
from streams.records import PROMPT, Sources, Tokens

Choice = Literal["priority", "newest", "count"]

END = 2**32 - 1  # after each sequence; no token
LENGTHS = (3, 4, 5, 6, 7)
REACH = 5  # tokens guessed per recognised one, at most: what little fits goes wrong sooner
PASS_BYTES = 200  # a prompt's entry in the dictionary of passes, about
UNKNOWN = 0.5  # priority of what has no reward yet


def prompt_key(tokens: Tokens, sources: Sources) -> int:
    """What a trajectory's prompt is known by: the tokens before the first that are none of it."""
    others = np.flatnonzero(sources != PROMPT)
    end = int(others[0]) if len(others) else len(tokens)
    return xxhash.xxh3_64_intdigest(tokens[:end].astype(np.uint32).tobytes())


def priority_of(reward: float | None) -> float:
    """In [0, 1], rising with the reward, whatever its scale; what is unjudged lies between."""
    return UNKNOWN if reward is None else 0.5 + 0.5 * reward / (1 + abs(reward))


@dataclass(frozen=True, slots=True)
class Answer:
    """A sequence after a prompt: its last `fresh` tokens followed the others."""

    prompt: int
    group: int
    tokens: Tokens
    fresh: int
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class _Ranked:
    """What is kept of an answer; patterns end at `first` and later."""

    prompt: int
    tokens: Tokens
    first: int
    rank: float


class History:
    """At most `tokens_max` tokens and as many n-grams as their table holds."""

    def __init__(
        self,
        tokens_max: int,
        lengths: Sequence[int] = LENGTHS,
        choice: Choice = "priority",
        reach: int = REACH,
    ) -> None:
        assert tokens_max >= 16, "room for a few tokens"
        assert list(lengths) == sorted(set(lengths)), "ascending lengths"
        self.tokens_max, self.lengths, self.choice = tokens_max, tuple(lengths), choice
        self.context, self.reach = self.lengths[-1], reach
        self._ring = np.full(tokens_max, END, np.uint32)
        self._tokens = self._ring.data
        self._table = Table(_entries(tokens_max, lengths))
        self._head = tokens_max  # so that every place is > 0 and `floor` ≥ 0
        self._passes: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.inserted = 0

    @property
    def bytes(self) -> int:
        """Of everything, at the present size."""
        return self._ring.nbytes + self._table.bytes + PASS_BYTES * len(self._passes)

    @property
    def floor(self) -> int:
        """Occurrences at smaller places are forgotten."""
        return self._head - self.tokens_max

    def insert(
        self,
        prompt: int,
        group: int,
        tokens: Tokens,
        fresh: int,
        reward: float | None = None,
    ) -> None:
        """The last `fresh` of these tokens followed the others. A group later than any seen of this
        prompt begins its next pass.
        """
        self.insert_all([Answer(prompt, group, tokens, fresh, reward)])

    def insert_all(self, answers: Sequence[Answer]) -> None:
        """The same as one after the other, faster; of equal patterns the best one stays."""
        kept = [self._ranked(answer) for answer in answers]
        kept = [one for one in kept if len(one.tokens) > one.first]
        total = sum(len(one.tokens) + 1 for one in kept)
        alone = self.choice == "count" or total > self.tokens_max // 2
        for some in [[one] for one in kept] if alone else [kept]:
            if self.choice == "priority":
                some.sort(key=lambda one: one.rank)  # the last of equal keys stays
            if some:
                self._insert(some)

    def _ranked(self, answer: Answer) -> _Ranked:
        longest = self.tokens_max // 2 - 1
        tokens = answer.tokens[-(answer.fresh + self.context) :][-longest:]
        first = max(len(tokens) - answer.fresh, self.lengths[0])
        rank = 0.0
        if len(tokens) > first:
            rank = self._pass(answer.prompt, answer.group) + priority_of(answer.reward)
        return _Ranked(answer.prompt, tokens, first, rank)

    def _insert(self, some: Sequence[_Ranked]) -> None:
        counts = np.array([len(one.tokens) for one in some])
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        place = np.arange(len(starts)) - starts
        bases = np.repeat(np.array([self._store(one.tokens) for one in some]), counts)
        firsts = np.repeat(np.array([one.first for one in some]), counts)
        ranks = np.repeat(np.array([one.rank for one in some], np.float32), counts)
        prompts = np.repeat(np.array([one.prompt for one in some], np.uint64), counts)
        tokens = np.concatenate([one.tokens for one in some])
        found = keys_of(prompts, tokens, np.where(place >= firsts, place, -1), self.lengths)
        at = np.concatenate([positions for _, positions in found])
        self._index(np.concatenate([keys for keys, _ in found]), (bases + place)[at], ranks[at])
        self.inserted += int((counts - [one.first for one in some]).sum())

    def grown(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """A sequence that still runs is drafted from as well."""
        self.insert(prompt, group, tokens, fresh)

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """What followed the longest recognised end of `newest`, up to the end of its sequence and
        to `reach` tokens for each recognised one.
        """
        keys = keys_at(prompt, newest, self.lengths)
        floor, size = self.floor, self.tokens_max
        for index in range(len(keys) - 1, -1, -1):
            place = self._table.place(keys[index])
            if place < floor:
                continue
            length, at = self.lengths[index], place % size
            if at < length or self._tokens[at - length : at].tolist() != list(newest[-length:]):
                continue
            found = self._tokens[at : at + min(most, self.reach * length)].tolist()
            if END in found:
                found = found[: found.index(END)]
            if found:
                return Draft(found, length)
        return NOTHING

    def _pass(self, prompt: int, group: int) -> int:
        """How often this prompt came round, as far as it is remembered."""
        newest, count = self._passes.get(prompt, (-1, 0))
        if group > newest:
            newest, count = group, count + 1
        self._passes[prompt] = (newest, count)
        self._passes.move_to_end(prompt)
        while len(self._passes) > _prompts(self.tokens_max):
            self._passes.popitem(last=False)
        return count

    def _store(self, tokens: Tokens) -> int:
        """Append a sequence and its end to the ring, never around its end; its place."""
        count = len(tokens) + 1
        at = self._head % self.tokens_max
        if at + count > self.tokens_max:
            self._ring[at:] = END
            self._head += self.tokens_max - at
            at = 0
        base = self._head
        self._head += count
        self._ring[at : at + count - 1] = tokens
        self._ring[at + count - 1] = END
        return base

    def _index(self, keys: Keys, places: Places, ranks: Ranks) -> None:
        exists, at = self._table.find(keys)
        known, new = np.flatnonzero(exists), np.flatnonzero(~exists)
        if len(known):
            self._choose(at[known], places[known], ranks[known])
        if len(new):
            given = np.ones(len(new), np.float32) if self.choice == "count" else ranks[new]
            self._table.add(keys[new], places[new], given, self.floor)

    def _choose(self, at: Places, places: Places, ranks: Ranks) -> None:
        """Between the occurrence that is known and a new one, per entry."""
        table = self._table
        dead = table.places[at] < self.floor
        if self.choice == "count":
            before = self._ring[table.places[at] % self.tokens_max]
            agrees = before == self._ring[places % self.tokens_max]
            votes = np.where(dead, 1, table.ranks[at] + np.where(agrees, 1, -1))
            better = dead | agrees | (votes < 0)
            table.ranks[at] = np.where(votes < 0, 1, votes)
            table.places[at[better]] = places[better]
            return
        better = np.ones_like(dead)
        if self.choice == "priority":
            better = dead | (ranks >= table.ranks[at])
        table.write(at[better], places[better], ranks[better])


def history_bytes(tokens_max: int, lengths: Sequence[int] = LENGTHS) -> int:
    """What a history of this size takes at most."""
    table = table_slots(_entries(tokens_max, lengths)) * ENTRY_BYTES
    return 4 * tokens_max + table + PASS_BYTES * _prompts(tokens_max)


def _entries(tokens_max: int, lengths: Sequence[int]) -> int:
    """A key per token and length, and a quarter more so that probes stay short."""
    return len(lengths) * tokens_max * 5 // 4


def _prompts(tokens_max: int) -> int:
    return max(16, tokens_max // 32)
