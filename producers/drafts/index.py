"""A hash table of bounded size in flat arrays: key → place of the best occurrence, and its rank.

An entry is within `PROBES` slots of its key's first slot, and every slot between was used at some
time, which bounds look-ups and insertions; if all these slots are taken the oldest occurrence is
replaced. Places only grow, so an entry whose place is below `floor` is dead and its slot free.
Insertions are done in batches; look-ups are in `lookup.py`.
"""

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.drafts.memory import PROBES, HistoryMemory
from rollstream.producers.drafts.ngrams import NgramKeys

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

    def settle(self, floor: int, head: int) -> None:
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
