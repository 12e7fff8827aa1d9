"""The arrays of a history in one block of memory, private or a mapped file: a header of a few
words, the table's keys, places and ranks, and the ring of tokens.

The header holds all sizes, so that a process that maps the file needs nothing else. It is read and
checked once, when the file is mapped; afterwards no value in the memory can cause an access outside
of it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NGRAM_LENGTHS = (3, 4, 5, 6, 7)
DRAFTED_PER_MATCHED = 5  # tokens drafted per matched one, at most: drafts with a short match fail sooner
SEQUENCE_END = 2**32 - 1  # mark after each sequence; not a token

PROBES = 8
ENTRY_BYTES = 20

MAGIC = int.from_bytes(b"rhymes/1", "little")
HEADER_BYTES = 256
HEADER_WORDS = HEADER_BYTES // 8
_MAGIC, _TOKENS_MAX, _REACH, _COUNT, _LENGTHS = range(5)  # lengths fill up to 16 words
WRITER_WORD, HEAD_WORD, INSERTED_WORD = HEADER_WORDS - 3, HEADER_WORDS - 2, HEADER_WORDS - 1
"""Words that change: the writing process, the place of the next token, the tokens inserted."""
HISTORY_TOKENS_MIN, HISTORY_TOKENS_MAX = 16, 1 << 31
NGRAM_LENGTH_MAX = 64


def table_slots(entries: int) -> int:
    """Slots of a table for this many entries: a power of two, plus the slots that the last ones
    probe beyond the end, in place of wrapping around.
    """
    return (1 << max(4, (entries - 1).bit_length())) + PROBES


@dataclass(frozen=True, slots=True)
class HistoryLayout:
    """The parameters that determine the sizes of all arrays."""

    tokens_max: int
    lengths: tuple[int, ...] = NGRAM_LENGTHS
    reach: int = DRAFTED_PER_MATCHED

    @property
    def slots(self) -> int:
        """Slots for a key per token and length, and a quarter more so that probes stay short."""
        return table_slots(len(self.lengths) * self.tokens_max * 5 // 4)

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + ENTRY_BYTES * self.slots + 4 * self.tokens_max

    def words(self) -> list[int]:
        """The header of an empty history. Its head starts at `tokens_max`, so that every place is
        above 0 and the lowest valid place is never negative.
        """
        words = [0] * HEADER_WORDS
        words[_MAGIC], words[_TOKENS_MAX], words[_REACH] = MAGIC, self.tokens_max, self.reach
        words[_COUNT] = len(self.lengths)
        words[_LENGTHS : _LENGTHS + len(self.lengths)] = self.lengths
        words[HEAD_WORD] = self.tokens_max
        return words


def parse_layout(words: Sequence[int]) -> HistoryLayout | None:
    """The layout in a header; None if the words are no valid header."""
    count = words[_COUNT]
    if words[_MAGIC] != MAGIC or not 0 < count <= 16:
        return None
    lengths = tuple(words[_LENGTHS : _LENGTHS + count])
    sizes_fit = HISTORY_TOKENS_MIN <= words[_TOKENS_MAX] <= HISTORY_TOKENS_MAX and 0 < words[_REACH] <= 1024
    if not sizes_fit or list(lengths) != sorted(set(lengths)):
        return None
    if lengths[0] < 1 or lengths[-1] > NGRAM_LENGTH_MAX:
        return None
    return HistoryLayout(words[_TOKENS_MAX], lengths, words[_REACH])


class HistoryMemory:
    """Memoryviews of a buffer of this layout. Reading one item of a memoryview is twice as fast as
    reading one of a numpy array.
    """

    def __init__(self, layout: HistoryLayout, buffer: memoryview) -> None:
        assert len(buffer) == layout.bytes, "a buffer of another layout"
        self.layout = layout
        ends = [HEADER_BYTES]
        for size in (8 * layout.slots, 8 * layout.slots, 4 * layout.slots, 4 * layout.tokens_max):
            ends.append(ends[-1] + size)
        self.words = buffer[: ends[0]].cast("q")
        self.keys = buffer[ends[0] : ends[1]].cast("Q")
        self.places = buffer[ends[1] : ends[2]].cast("q")
        self.ranks = buffer[ends[2] : ends[3]]  # bytes; only writers read them
        self.tokens = buffer[ends[3] : ends[4]].cast("I")


def allocate_memory(layout: HistoryLayout) -> HistoryMemory:
    """An empty memory that is private to this process."""
    memory = HistoryMemory(layout, np.zeros(layout.bytes, np.uint8).data)
    memory.words[:] = memoryview(array("q", layout.words()))
    return memory
