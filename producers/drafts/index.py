"""Looks up drafts in an n-gram index: the tokens that followed the longest match of the newest
tokens (`look_up_draft`). `DraftSource` is the interface by which engines use a look-up.

A look-up may run while another process writes to the memory. Whatever the memory holds, random
bytes included, a look-up reads only inside the memory, ends after `PROBES` slots for each n-gram
length, and returns a draft only from a place whose preceding tokens equal the newest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.shared_memory import HEAD_WORD, PROBES, SEQUENCE_END, HistoryMemory
from rollstream.streams.values import Tokens

NgramKeys = NDArray[np.uint64]
"""Keys of positions, one per n-gram length. A key is a 64-bit hash of that many tokens before the
position and of the prompt: a polynomial in an odd multiplier, modulo 2^64, then two rounds of
mixing. `ngram_keys` computes the keys of all positions of a sequence at once, `ngram_sums` and
`ngram_key` those of one position in plain integers; both give the same keys. Keys can collide, so a
look-up also compares the tokens.
"""

_MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_LENGTH_MAX = 64


def _powers() -> tuple[int, ...]:
    found = [1]
    while len(found) < _LENGTH_MAX:
        found.append(found[-1] * _BASE & _MASK)
    return tuple(found)


_POWERS = _powers()
_POWERS_64 = np.array(_POWERS, np.uint64)


def ngram_keys(
    prompts: NgramKeys, tokens: Tokens, places: NDArray[np.int64], lengths: Sequence[int]
) -> list[tuple[NgramKeys, NDArray[np.int64]]]:
    """Return, per length (ascending), the keys of all positions that have at least that many tokens
    before them, and these positions.

    `tokens` holds sequences one after the other. For each position, `prompts` is the sequence's
    prompt and `places` the number of the sequence's tokens before it, negative for a position
    without a key.
    """
    weights = tokens.astype(np.uint64) + np.uint64(1)
    sums = np.zeros(len(tokens), np.uint64)  # at position i: the sum over the tokens before i
    found: list[tuple[NgramKeys, NDArray[np.int64]]] = []
    done = 0
    for length in lengths:
        for back in range(done + 1, min(length + 1, len(tokens))):
            sums[back:] += weights[:-back] * _POWERS_64[back - 1]
        done = length
        at = np.flatnonzero(places >= length)
        salt = np.uint64(length * _MIX & _MASK)
        found.append((_mixed(sums[at] ^ prompts[at] ^ salt), at))
    return found


def ngram_sums(newest: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return, per length (ascending) for which `newest` has enough tokens, the sum that `ngram_key`
    turns into a key. Mixing costs most, and mostly the longest length matches already, so each key
    is computed only when it is looked up.
    """
    found: list[int] = []
    total, done, count = 0, 0, len(newest)
    for length in lengths:
        if length > count:
            break
        for back in range(done + 1, length + 1):
            total += (newest[-back] + 1) * _POWERS[back - 1]
        done = length
        found.append(total)
    return found


def ngram_key(prompt: int, total: int, length: int) -> int:
    """Return the key of the position after `length` tokens with this sum."""
    key = (total ^ prompt ^ length * _MIX) & _MASK
    key = (key ^ (key >> 32)) * _MIX & _MASK
    key = (key ^ (key >> 32)) * _MIX & _MASK
    return (key ^ (key >> 32)) or 1


def _mixed(keys: NgramKeys) -> NgramKeys:
    for _ in range(2):
        keys = (keys ^ (keys >> np.uint64(32))) * np.uint64(_MIX)
    keys ^= keys >> np.uint64(32)
    keys[keys == 0] = 1  # 0 marks an empty entry
    return keys


RingPositions = NDArray[np.int64]
EntryRanks = NDArray[np.float32]


class NgramTable:
    """Finds and writes entries of the n-gram table in a history's memory: three flat arrays of
    bounded size with the key, the place of the key's best occurrence in the ring of tokens, and the
    rank of that occurrence.

    An entry is within `PROBES` slots of its key's first slot, and every slot between was used at
    some time, which bounds look-ups and insertions. If all these slots are taken, a new entry
    replaces the one with the oldest occurrence. Places only grow, so an entry whose place is below
    `floor` is dead and its slot free. Insertions are done in batches.
    """

    def __init__(self, memory: HistoryMemory) -> None:
        self.keys: NgramKeys = np.frombuffer(memory.keys, np.uint64)
        self.places: RingPositions = np.frombuffer(memory.places, np.int64)
        self.ranks: EntryRanks = np.frombuffer(memory.ranks, np.float32)
        self.slots = len(self.keys) - PROBES

    def find(self, keys: NgramKeys) -> tuple[NDArray[np.bool_], RingPositions]:
        """Return which keys have an entry, and a slot for each key: the slot of the entry, or the
        first probed slot if there is none.
        """
        slots = self._probed_slots(keys)
        same = self.keys[slots] == keys[:, None]
        at = slots[np.arange(len(keys)), same.argmax(1)]
        return same.any(1), at

    def write(self, at: RingPositions, places: RingPositions, ranks: EntryRanks) -> None:
        """Point existing entries to other occurrences."""
        self.places[at] = places
        self.ranks[at] = ranks

    def add(self, keys: NgramKeys, places: RingPositions, ranks: EntryRanks, floor: int) -> None:
        """Add entries for keys that have none; of equal keys the last one stays."""
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
        """Repair the table of a writer that died: entries that point outside of the valid places
        become dead, all others keep their place and lose their rank.
        """
        lost = (self.keys != 0) & ((self.places < floor) | (self.places >= head))
        self.places[lost] = -1  # dead, not empty: an empty slot would end probes too early
        self.ranks[:] = 0

    def _probed_slots(self, keys: NgramKeys) -> RingPositions:
        """Return the slots that may hold each of the n keys: (n, PROBES)."""
        first = (keys & np.uint64(self.slots - 1)).astype(np.int64)
        return first[:, None] + np.arange(PROBES)


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds the `tokens` that may come next; `matched` is how many of the newest tokens were found
    in the history. If it is 0, `tokens` is empty.
    """

    tokens: Sequence[int]
    matched: int


NO_DRAFT = Draft((), 0)


class DraftSource(Protocol):
    """Returns drafts to an engine, which passes generated tokens back to it.

    The engine verifies every token of a draft, so a wrong, old or torn draft costs time and never
    changes an output. Prompts are identified by their tokens (`history.prompt_key`), not by a
    request, so that an engine without request ids can use the same calls.
    """

    context: int
    """How many of the newest tokens a look-up uses, at most."""

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """Return at most `most` tokens that may follow `newest` (oldest first) in this prompt."""
        ...

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens, which the engine generated after the others."""
        ...


class HistoryView:
    """Looks up drafts in one shared memory, which another process may be writing."""

    def __init__(self, memory: HistoryMemory) -> None:
        layout = memory.layout
        self.lengths, self.size, self.reach = layout.lengths, layout.tokens_max, layout.reach
        self._mask = layout.slots - PROBES - 1
        self._words, self._tokens = memory.words, memory.tokens
        self._keys, self._places = memory.keys, memory.places

    def after(self, key: int, newest: list[int], length: int, most: int) -> list[int]:
        """Return the tokens after the best occurrence of the `length` newest tokens, whose key is
        `key`; [] if there is none.
        """
        keys, slot = self._keys, key & self._mask
        for at in range(slot, slot + PROBES):
            present = keys[at]
            if present == key:
                return self._tokens_at(self._places[at], newest, length, most)
            if not present:  # never used, so no later slot can hold the key
                break
        return []

    def _tokens_at(self, place: int, newest: list[int], length: int, most: int) -> list[int]:
        if place < self._words[HEAD_WORD] - self.size:
            return []
        at, tokens = place % self.size, self._tokens
        if at < length or tokens[at - length : at].tolist() != newest[-length:]:
            return []
        found = tokens[at : at + min(most, self.reach * length)].tolist()
        return found[: found.index(SEQUENCE_END)] if SEQUENCE_END in found else found


def look_up_draft(
    views: Sequence[HistoryView], prompt: int, newest: Sequence[int], most: int
) -> Draft:
    """Return the tokens that followed the longest match of the end of `newest`, up to the end of
    their sequence, at most `reach` tokens for each matched one and at most `most`. Of views that
    match equally many tokens the first one is used. All views must have the same n-gram lengths.
    """
    lengths, newest = views[0].lengths, list(newest)
    sums = ngram_sums(newest, lengths)
    for index in range(len(sums) - 1, -1, -1):
        length = lengths[index]
        key = ngram_key(prompt, sums[index], length)
        for view in views:
            found = view.after(key, newest, length, most)
            if found:
                return Draft(found, length)
    return NO_DRAFT
