"""The n-gram index of a history: keys, and the hash table from a key to a place in the ring.

A key is a 64-bit hash of the few tokens before a position, one per n-gram length, and of the
prompt: a polynomial in an odd multiplier, modulo 2^64, then two rounds of mixing. `ngram_keys`
computes the keys of all positions of a sequence at once, `ngram_sums` and `ngram_key` those of one
position in plain integers; both give the same keys. Keys can collide, so a look-up also compares
the tokens.

The table has a bounded size and is in flat arrays: key → place of the best occurrence, and its
rank. An entry is within `PROBES` slots of its key's first slot, and every slot between was used at
some time, which bounds look-ups and insertions; if all these slots are taken the oldest occurrence
is replaced. Places only grow, so an entry whose place is below `floor` is dead and its slot free.
Insertions are done in batches; look-ups are in `source.py`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.shared_memory import PROBES, HistoryMemory
from rollstream.streams.values import Tokens

NgramKeys = NDArray[np.uint64]

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
    """Per length (ascending): the keys of all positions that have at least that many tokens before
    them, and these positions.

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
    """Per length (ascending) for which `newest` has tokens: the sum that `ngram_key` turns into a
    key. Mixing costs most and the longest match is mostly found, so keys are computed one by one.
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
    """The key of the position after `length` tokens with this sum."""
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
    """The table in a memory."""

    def __init__(self, memory: HistoryMemory) -> None:
        self.keys: NgramKeys = np.frombuffer(memory.keys, np.uint64)
        self.places: RingPositions = np.frombuffer(memory.places, np.int64)
        self.ranks: EntryRanks = np.frombuffer(memory.ranks, np.float32)
        self.slots = len(self.keys) - PROBES

    def find(self, keys: NgramKeys) -> tuple[NDArray[np.bool_], RingPositions]:
        """Which of the keys have an entry, and a slot for each key: that of its entry, else the
        first slot that is probed.
        """
        slots = self._near(keys)
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
            slots = self._near(keys)
            there, lie = self.keys[slots], self.places[slots]
            mine = there == keys[:, None]
            lie[(there == 0) | (lie < floor)] = -1  # free slots before the oldest occurrence …
            lie[mine] = -2  # … and before both the entry that an equal key just made
            at = slots[np.arange(len(keys)), lie.argmin(1)]
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

    def _near(self, keys: NgramKeys) -> RingPositions:
        """(n, PROBES) slots that may hold each key."""
        first = (keys & np.uint64(self.slots - 1)).astype(np.int64)
        return first[:, None] + np.arange(PROBES)
