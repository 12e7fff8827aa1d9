"""A hash table of bounded size in flat arrays: key → place of the best occurrence, and its rank.

An entry lies within `PROBES` slots of where its key points, and no slot before it was never used,
so no look-up and no insertion is ever longer; where all are taken the oldest occurrence gives way.
Places only grow, so an entry whose place is below `floor` is dead and its slot free. Whole batches
are inserted at once; looking up is `lookup.py`'s.
"""

import numpy as np
from numpy.typing import NDArray

from producers.engines.drafts.memory import PROBES, Memory
from producers.engines.drafts.ngrams import Keys

Places = NDArray[np.int64]
Ranks = NDArray[np.float32]


class Table:
    """The entries that lie in a memory."""

    def __init__(self, memory: Memory) -> None:
        self.keys: Keys = np.frombuffer(memory.keys, np.uint64)
        self.places: Places = np.frombuffer(memory.places, np.int64)
        self.ranks: Ranks = np.frombuffer(memory.ranks, np.float32)
        self.slots = len(self.keys) - PROBES

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

    def settle(self, floor: int, head: int) -> None:
        """After a writer that died in the middle: what points nowhere goes, all else stays until
        anything better comes.
        """
        lost = (self.keys != 0) & ((self.places < floor) | (self.places >= head))
        self.places[lost] = -1  # dead; emptied it would hide what lies behind it
        self.ranks[:] = 0

    def _near(self, keys: Keys) -> Places:
        """(n, PROBES) slots of each key."""
        first = (keys & np.uint64(self.slots - 1)).astype(np.int64)
        return first[:, None] + np.arange(PROBES)
