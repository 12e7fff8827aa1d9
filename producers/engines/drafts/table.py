"""A hash table of bounded size in flat arrays: key → place of the best occurrence, and its rank.

An entry lies within `PROBES` slots of where its key points, so no look-up and no insertion is ever
longer; where all of them are taken the oldest occurrence gives way. Places only grow, so an entry
whose place is below `floor` is dead and its slot free. Whole batches are inserted at once.
"""

import numpy as np
from numpy.typing import NDArray

from producers.engines.drafts.ngrams import Keys

Places = NDArray[np.int64]
Ranks = NDArray[np.float32]

PROBES = 8
ENTRY_BYTES = 20


def table_slots(entries: int) -> int:
    """Slots of a table for so many entries: a power of two, and what the last ones probe beyond the
    end instead of around it.
    """
    return (1 << max(4, (entries - 1).bit_length())) + PROBES


class Table:
    """Room for `entries` at least."""

    def __init__(self, entries: int) -> None:
        size = table_slots(entries)
        self.slots = size - PROBES
        self.keys: Keys = np.zeros(size, np.uint64)
        self.places: Places = np.zeros(size, np.int64)
        self.ranks: Ranks = np.zeros(size, np.float32)
        # Single items of a memoryview are read twice as fast as those of an array.
        self._keys = self.keys.data
        self._places = self.places.data

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.places.nbytes + self.ranks.nbytes

    def place(self, key: int) -> int:
        """Where the best occurrence of this key lies; -1 if there is none. It may be dead."""
        slot = key & (self.slots - 1)
        keys = self._keys
        for at in range(slot, slot + PROBES):
            if keys[at] == key:
                return self._places[at]
        return -1

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Places]:
        """Which of the keys have an entry, and the slots of all (of those that have none: where to
        begin looking for room).
        """
        slots = self._near(keys)
        same = self.keys[slots] == keys[:, None]
        at = slots[np.arange(len(keys)), same.argmax(1)]
        return same.any(1), at

    def write(self, at: Places, places: Places, ranks: Ranks) -> None:
        """Entries that exist point to another occurrence from now on."""
        self.places[at] = places
        self.ranks[at] = ranks

    def add(self, keys: Keys, places: Places, ranks: Ranks, floor: int) -> None:
        """Entries for keys that have none; of equal keys the last one stays."""
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

    def _near(self, keys: Keys) -> Places:
        """(n, PROBES) slots of each key."""
        first = (keys & np.uint64(self.slots - 1)).astype(np.int64)
        return first[:, None] + np.arange(PROBES)
