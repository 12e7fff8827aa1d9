"""One thread writes. Others, also processes, may read half-written data: the engine verifies every
draft. They write nothing: the writer relies only on values that a writer wrote.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from rollstream.producers.drafts import index, shared_memory
from rollstream.streams.records import PROMPT
from rollstream.streams.values import Sources, Tokens

UNREWARDED_PRIORITY = 0.5  # priority of an answer without a reward
RUNNING_PRIORITY = 0.0  # of a running sequence: every finished answer of the same pass ranks higher
PASS_BYTES = 200  # estimated memory of a prompt's entry in `PromptPasses`
UNREWARDED_BYTES = 400  # estimated memory of the entry of an answer that waits for its reward


def reward_priority(reward: float | None) -> float:
    """Returns a priority in [0, 1] that rises with the reward, whatever its scale."""
    return UNREWARDED_PRIORITY if reward is None else 0.5 + 0.5 * reward / (1 + abs(reward))


class PromptPasses:
    """Counts, for the `prompts_max` prompts used last, the passes over all prompts (epochs)."""

    def __init__(self, prompts_max: int) -> None:
        self._most = prompts_max
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def number(self, prompt: int, group: int) -> int:
        """Returns the group's pass; a group later than all earlier ones of the prompt begins the
        next.
        """
        newest, count = self._known.get(prompt, (-1, 0))
        if group > newest:
            newest, count = group, count + 1
        self._known[prompt] = (newest, count)
        self._known.move_to_end(prompt)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return count


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer in the ring: `count` tokens from place `base`; table entries from index `first`
    on.
    """

    prompt: int
    number: int
    base: int
    count: int
    first: int


OccurrenceChoice = Literal["priority", "newest", "count"]


def prompt_key(tokens: Tokens, sources: Sources) -> int:
    others = np.flatnonzero(sources != PROMPT)
    end = int(others[0]) if len(others) else len(tokens)
    return xxhash.xxh3_64_intdigest(tokens[:end].astype(np.uint32).tobytes())


@dataclass(frozen=True, slots=True)
class HistoryAnswer:
    """The last `fresh` of `tokens` are new, the others their context. An answer with a `name` and
    no reward may get one later.
    """

    prompt: int
    group: int
    tokens: Tokens
    fresh: int
    reward: float | None = None
    name: str = ""
    runs: bool = False


@dataclass(frozen=True, slots=True)
class _RankedAnswer:
    """An answer, cut to the tokens that are stored; those from `first` on get table entries."""

    prompt: int
    tokens: Tokens
    first: int
    number: int
    # `number` plus a priority in [0, 1] from the reward: an answer of a later pass ranks higher,
    # and of one pass the one with the higher reward.
    rank: float
    name: str = ""


class AnswerHistory:
    """For each position the n-grams of 3 … 7 tokens before it (RhymeRL, arXiv 2508.18588) are keys
    of a table; an entry points behind the n-gram's best occurrence, where the draft begins.
    `choice` defines it: `priority` (highest rank), `newest`, or `count` (a majority vote over the
    next token, Boyer and Moore 1981). `reach` bounds a draft's tokens for each token of the n-gram.
    """

    # RhymeRL follows the highest priority at every branch of a tree. That ends in the same sequence
    # as copying from the answer with the highest rank, so no tree is needed.
    def __init__(
        self,
        tokens_max: int,
        lengths: Sequence[int] = shared_memory.NGRAM_LENGTHS,
        choice: OccurrenceChoice = "priority",
        reach: int = shared_memory.DRAFTED_PER_MATCHED,
        memory: shared_memory.HistoryMemory | None = None,
    ) -> None:
        assert tokens_max >= shared_memory.HISTORY_TOKENS_MIN, "room for a few tokens"
        assert list(lengths) == sorted(set(lengths)), "ascending lengths"
        layout = shared_memory.HistoryLayout(tokens_max, tuple(lengths), reach)
        memory = shared_memory.allocate_memory(layout) if memory is None else memory
        assert memory.layout == layout, "a memory for this history"
        self.layout, self.tokens_max, self.lengths = layout, tokens_max, layout.lengths
        self.choice, self.context = choice, layout.lengths[-1]
        self.view = index.HistoryView(memory)
        self._ring = np.frombuffer(memory.tokens, np.uint32)
        self._table = index.NgramTable(memory)
        self._words = memory.words
        self._head = max(tokens_max, min(self._words[shared_memory.HEAD_WORD], 2**62))
        # Another writer used this memory before.
        if self._words[shared_memory.HEAD_WORD] != tokens_max:
            self._table.repair(self.floor, self._head)
        self._words[shared_memory.HEAD_WORD] = self._head
        self._prompts_max = max(16, tokens_max // 32)
        self._passes = PromptPasses(self._prompts_max)
        # The last stored answers without a reward, by name: a late reward ranks them again.
        self._waiting = OrderedDict[str, StoredAnswer]()
        self.inserted = 0

    @property
    def bytes(self) -> int:
        # Estimates; only the layout is exact.
        entries_bytes = PASS_BYTES * len(self._passes) + UNREWARDED_BYTES * len(self._waiting)
        return self.layout.bytes + entries_bytes

    @property
    def floor(self) -> int:
        return self._head - self.tokens_max

    def insert(
        self,
        prompt: int,
        group: int,
        tokens: Tokens,
        fresh: int,
        reward: float | None = None,
    ) -> None:
        self.insert_all([HistoryAnswer(prompt, group, tokens, fresh, reward)])

    def insert_all(self, answers: Sequence[HistoryAnswer]) -> None:
        """Insert answers; an n-gram keeps its best occurrence, as if inserted one by one."""
        ranked_answers = [self._ranked(answer) for answer in answers]
        ranked_answers = [ranked for ranked in ranked_answers if len(ranked.tokens) > ranked.first]
        total = sum(len(ranked.tokens) + 1 for ranked in ranked_answers)
        # Votes are counted answer by answer, and a batch must not overwrite its own begin.
        alone = self.choice == "count" or total > self.tokens_max // 2
        for batch in [[ranked] for ranked in ranked_answers] if alone else [ranked_answers]:
            if self.choice == "priority":
                batch.sort(key=lambda ranked: ranked.rank)  # the last of equal keys stays
            if batch:
                self._insert(batch)

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        self.insert_all([HistoryAnswer(prompt, group, tokens, fresh, runs=True)])

    def add_reward(self, name: str, reward: float) -> bool:
        """Ranks an answer again; False if none of this name waits for a reward."""
        stored = self._waiting.pop(name, None)
        if stored is None:
            return False
        if self.choice == "priority" and stored.base >= self.floor:
            at, rank = stored.base % self.tokens_max, stored.number + reward_priority(reward)
            tokens = self._ring[at : at + stored.count].copy()
            reranked = _RankedAnswer(stored.prompt, tokens, stored.first, stored.number, rank)
            self._add_ngrams([reranked], [stored.base])
        return True

    def draft(self, prompt: int, newest: Sequence[int], tokens_max: int) -> index.Draft:
        return index.look_up_draft((self.view,), prompt, newest, tokens_max)

    def _ranked(self, answer: HistoryAnswer) -> _RankedAnswer:
        longest = self.tokens_max // 2 - 1
        tokens = answer.tokens[-(answer.fresh + self.context) :][-longest:]
        first = max(len(tokens) - answer.fresh, self.lengths[0])
        number, rank = 0, 0.0
        if len(tokens) > first:
            number = self._passes.number(answer.prompt, answer.group)
            rank = number + (RUNNING_PRIORITY if answer.runs else reward_priority(answer.reward))
        name = answer.name if answer.reward is None and not answer.runs else ""
        return _RankedAnswer(answer.prompt, tokens, first, number, rank, name)

    def _insert(self, answers: Sequence[_RankedAnswer]) -> None:
        bases = [self._store(answer.tokens) for answer in answers]
        self._add_ngrams(answers, bases)
        self.inserted += sum(len(answer.tokens) - answer.first for answer in answers)
        self._words[shared_memory.INSERTED_WORD] = self.inserted
        for answer, base in zip(answers, bases, strict=True):
            if answer.name:
                stored = StoredAnswer(
                    answer.prompt, answer.number, base, len(answer.tokens), answer.first
                )
                self._waiting[answer.name] = stored
                self._waiting.move_to_end(answer.name)
        while len(self._waiting) > self._prompts_max:
            self._waiting.popitem(last=False)

    def _add_ngrams(self, answers: Sequence[_RankedAnswer], stored: Sequence[int]) -> None:
        # `stored` has the place of each answer's first token.
        counts = np.array([len(answer.tokens) for answer in answers])
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        place = np.arange(len(starts)) - starts
        bases = np.repeat(np.array(stored), counts)
        firsts = np.repeat(np.array([answer.first for answer in answers]), counts)
        ranks = np.repeat(np.array([answer.rank for answer in answers], np.float32), counts)
        prompts = np.repeat(np.array([answer.prompt for answer in answers], np.uint64), counts)
        tokens = np.concatenate([answer.tokens for answer in answers])
        keys_by_length = index.ngram_keys(
            prompts, tokens, np.where(place >= firsts, place, -1), self.lengths
        )
        at = np.concatenate([positions for _, positions in keys_by_length])
        self._index(
            np.concatenate([keys for keys, _ in keys_by_length]), (bases + place)[at], ranks[at]
        )

    def _store(self, tokens: Tokens) -> int:
        count = len(tokens) + 1
        at, skipped = self._head % self.tokens_max, 0
        # A sequence never wraps around: a draft is one slice.
        if at + count > self.tokens_max:
            at, skipped = 0, self.tokens_max - at
        base = self._head + skipped
        self._head = base + count
        # Entries for overwritten tokens become invalid before the tokens are overwritten.
        self._words[shared_memory.HEAD_WORD] = self._head
        if skipped:
            self._ring[-skipped:] = shared_memory.SEQUENCE_END
        self._ring[at : at + count - 1] = tokens
        self._ring[at + count - 1] = shared_memory.SEQUENCE_END
        return base

    def _index(
        self, keys: index.NgramKeys, places: index.RingPositions, ranks: index.EntryRanks
    ) -> None:
        exists, at = self._table.find(keys)
        present, new = np.flatnonzero(exists), np.flatnonzero(~exists)
        if len(present):
            self._choose(at[present], places[present], ranks[present])
        if len(new):
            new_ranks = np.ones(len(new), np.float32) if self.choice == "count" else ranks[new]
            self._table.add(keys[new], places[new], new_ranks, self.floor)

    def _choose(
        self, at: index.RingPositions, places: index.RingPositions, ranks: index.EntryRanks
    ) -> None:
        table = self._table
        # `at` has the entries, `places` their new occurrences.
        overwritten = table.places[at] < self.floor
        if self.choice == "count":
            before = self._ring[table.places[at] % self.tokens_max]
            agrees = before == self._ring[places % self.tokens_max]
            votes = np.where(overwritten, 1, table.ranks[at] + np.where(agrees, 1, -1))
            better = overwritten | agrees | (votes < 0)
            table.ranks[at] = np.where(votes < 0, 1, votes)
            table.places[at[better]] = places[better]
            return
        better = np.ones_like(overwritten)
        if self.choice == "priority":  # an occurrence that is ranked again replaces itself
            better = overwritten | (ranks >= table.ranks[at]) | (table.places[at] == places)
        table.write(at[better], places[better], ranks[better])
