"""Finds drafts by the longest match of a sequence's newest tokens. A look-up may run while another
process writes. Whatever the memory holds, it reads only inside it, probes at most `PROBES` slots
per n-gram length, and returns a draft only from a place whose preceding tokens equal the newest
ones.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.shared_memory import HEAD_WORD, PROBES, SEQUENCE_END, HistoryMemory
from rollstream.producers.engines.drafting import NO_DRAFT, Draft
from rollstream.streams.values import Tokens

NgramKeys = NDArray[np.uint64]
"""An n-gram's 64-bit hash: a sum of its tokens times powers of an odd number, modulo 2^64, and the
prompt's key, mixed twice. Keys can collide, so a look-up also compares the tokens.
"""

_MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_LENGTH_MAX = 64  # of an n-gram


def _powers() -> tuple[int, ...]:
    powers = [1]
    while len(powers) < _LENGTH_MAX:
        powers.append(powers[-1] * _BASE & _MASK)
    return tuple(powers)


_POWERS = _powers()
_POWERS_64 = np.array(_POWERS, np.uint64)


def ngram_keys(
    prompts: NgramKeys, tokens: Tokens, places: NDArray[np.int64], lengths: Sequence[int]
) -> list[tuple[NgramKeys, NDArray[np.int64]]]:
    """Returns, for each length (ascending), the keys of all positions with at least so many tokens
    before them, and these positions. `prompts` has each position's `history.prompt_key`, `places`
    the number of the sequence's tokens before it, negative for a position that gets no key.
    """
    weights = tokens.astype(np.uint64) + np.uint64(1)
    sums = np.zeros(len(tokens), np.uint64)  # at position i: the sum over the tokens before i
    keys_by_length: list[tuple[NgramKeys, NDArray[np.int64]]] = []
    done = 0
    for length in lengths:
        for back in range(done + 1, min(length + 1, len(tokens))):
            sums[back:] += weights[:-back] * _POWERS_64[back - 1]
        done = length
        at = np.flatnonzero(places >= length)
        salt = np.uint64(length * _MIX & _MASK)
        keys_by_length.append((_mixed(sums[at] ^ prompts[at] ^ salt), at))
    return keys_by_length


def ngram_sums(newest: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns, for each length (ascending) for which `newest` has enough tokens, the sum for
    `ngram_key`.
    """
    # Mixing costs most, so it is left to `ngram_key`: often the longest length matches, and no
    # other is looked up.
    sums: list[int] = []
    total, done, count = 0, 0, len(newest)
    for length in lengths:
        if length > count:
            break
        for back in range(done + 1, length + 1):
            total += (newest[-back] + 1) * _POWERS[back - 1]
        done = length
        sums.append(total)
    return sums


def ngram_key(prompt: int, total: int, length: int) -> int:
    # `total` is the sum of the n-gram's tokens.
    key = (total ^ prompt ^ length * _MIX) & _MASK
    key = (key ^ (key >> 32)) * _MIX & _MASK
    key = (key ^ (key >> 32)) * _MIX & _MASK
    return (key ^ (key >> 32)) or 1  # 0 marks an empty entry


def _mixed(keys: NgramKeys) -> NgramKeys:
    # The same bits as in `ngram_key`.
    for _ in range(2):
        keys = (keys ^ (keys >> np.uint64(32))) * np.uint64(_MIX)
    keys ^= keys >> np.uint64(32)
    keys[keys == 0] = 1  # 0 marks an empty entry
    return keys


RingPositions = NDArray[np.int64]
"""Places of tokens, which number all tokens ever stored (`HistoryMemory`), or slots."""
EntryRanks = NDArray[np.float32]
"""Ranks of occurrences: an answer of a newer pass or with a higher reward ranks higher."""


class NgramTable:
    """A slot holds an n-gram's key, the place behind its best occurrence, and that one's rank.

    An entry is in the first slot of its key or one of the next `PROBES` − 1, and every slot before
    it was used at some time, so a search may end at a slot that was never used. An entry whose
    place is below `floor`, the smallest valid place, is dead and its slot free.
    """

    def __init__(self, memory: HistoryMemory) -> None:
        self.keys: NgramKeys = np.frombuffer(memory.keys, np.uint64)
        self.places: RingPositions = np.frombuffer(memory.places, np.int64)
        self.ranks: EntryRanks = np.frombuffer(memory.ranks, np.float32)
        self.slots = len(self.keys) - PROBES

    def find(self, keys: NgramKeys) -> tuple[NDArray[np.bool_], RingPositions]:
        """Returns whether each key has an entry, and its slot, or the first probed slot without an
        entry.
        """
        slots = self._probed_slots(keys)
        same = self.keys[slots] == keys[:, None]
        at = slots[np.arange(len(keys)), same.argmax(1)]
        return same.any(1), at

    def write(self, at: RingPositions, places: RingPositions, ranks: EntryRanks) -> None:
        self.places[at] = places
        self.ranks[at] = ranks

    def add(self, keys: NgramKeys, places: RingPositions, ranks: EntryRanks, floor: int) -> None:
        """Add entries for keys that have none; of equal keys the last one stays."""
        # Keys that lose their slot to another key of the batch try again; after these rounds they
        # are left out.
        for _ in range(PROBES):
            slots = self._probed_slots(keys)
            present, ages = self.keys[slots], self.places[slots]
            same = present == keys[:, None]
            ages[(present == 0) | (ages < floor)] = -1  # a free slot precedes the oldest entry
            ages[same] = -2  # the slot of an equal key precedes both
            at = slots[np.arange(len(keys)), ages.argmin(1)]
            self.keys[at] = keys
            self.places[at] = places
            self.ranks[at] = ranks
            lost = self.keys[at] != keys
            if not lost.any():
                return
            keys, places, ranks = keys[lost], places[lost], ranks[lost]

    def repair(self, floor: int, head: int) -> None:
        """Repairs the table after a writer's death: entries outside of [`floor`, `head`) become
        dead; others lose their rank.
        """
        lost = (self.keys != 0) & ((self.places < floor) | (self.places >= head))
        self.places[lost] = -1  # dead, not empty: an empty slot would end probes too early
        self.ranks[:] = 0

    def _probed_slots(self, keys: NgramKeys) -> RingPositions:
        first = (keys & np.uint64(self.slots - 1)).astype(np.int64)
        # (n, PROBES)
        return first[:, None] + np.arange(PROBES)


class HistoryView:
    """Looks up n-grams in a history that another thread or process may be writing."""

    def __init__(self, memory: HistoryMemory) -> None:
        layout = memory.layout
        self.lengths, self.size, self.reach = layout.lengths, layout.tokens_max, layout.reach
        self._mask = layout.slots - PROBES - 1
        self._words, self._tokens = memory.words, memory.tokens
        self._keys, self._places = memory.keys, memory.places

    def after(self, key: int, newest: list[int], length: int, tokens_max: int) -> list[int]:
        """Returns what followed the best occurrence of the `length` newest tokens; [] without a
        valid entry.
        """
        keys, slot = self._keys, key & self._mask
        for at in range(slot, slot + PROBES):
            present = keys[at]
            if present == key:
                return self._tokens_at(self._places[at], newest, length, tokens_max)
            if not present:  # never used, so no later slot can hold the key
                break
        return []

    def _tokens_at(self, place: int, newest: list[int], length: int, tokens_max: int) -> list[int]:
        # Overwritten.
        if place < self._words[HEAD_WORD] - self.size:
            return []
        at, tokens = place % self.size, self._tokens
        # Keys can collide.
        if at < length or tokens[at - length : at].tolist() != newest[-length:]:
            return []
        next_tokens = tokens[at : at + min(tokens_max, self.reach * length)].tolist()
        return (
            next_tokens[: next_tokens.index(SEQUENCE_END)]
            if SEQUENCE_END in next_tokens
            else next_tokens
        )


def look_up_draft(
    views: Sequence[HistoryView], prompt: int, newest: Sequence[int], tokens_max: int
) -> Draft:
    """Returns the tokens that followed the longest match, at most `reach` (`HistoryLayout`) for
    each matched token. Of equal matches the first view's is used; all have the same n-gram lengths.
    """
    lengths, newest = views[0].lengths, list(newest)
    sums = ngram_sums(newest, lengths)
    for index in range(len(sums) - 1, -1, -1):
        length = lengths[index]
        key = ngram_key(prompt, sums[index], length)
        for view in views:
            next_tokens = view.after(key, newest, length, tokens_max)
            if next_tokens:
                return Draft(next_tokens, length)
    return NO_DRAFT
