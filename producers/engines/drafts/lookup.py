"""Drafting from the memory of a history, which somebody else may be writing to.

Whatever lies there, random bytes included, a look-up reads inside of the memory, ends after a few
slots, and gives a guess or none: tokens come only from behind a place whose tokens before it are
those just seen.
"""

from collections.abc import Sequence

from producers.engines.drafts.memory import END, HEAD, PROBES, Memory
from producers.engines.drafts.ngrams import key_of, sums_at
from producers.engines.drafts.source import NOTHING, Draft


class View:
    """One memory, to be read."""

    def __init__(self, memory: Memory) -> None:
        layout = memory.layout
        self.lengths, self.size, self.reach = layout.lengths, layout.tokens_max, layout.reach
        self._mask = layout.slots - PROBES - 1
        self._words, self._tokens = memory.words, memory.tokens
        self._keys, self._places = memory.keys, memory.places

    def after(self, key: int, newest: list[int], length: int, most: int) -> list[int]:
        """What followed the best occurrence of the `length` newest tokens, whose key this is."""
        keys, slot = self._keys, key & self._mask
        for at in range(slot, slot + PROBES):
            there = keys[at]
            if there == key:
                return self._behind(self._places[at], newest, length, most)
            if not there:  # never used, so nothing was ever put behind it
                break
        return []

    def _behind(self, place: int, newest: list[int], length: int, most: int) -> list[int]:
        if place < self._words[HEAD] - self.size:
            return []
        at, tokens = place % self.size, self._tokens
        if at < length or tokens[at - length : at].tolist() != newest[-length:]:
            return []
        found = tokens[at : at + min(most, self.reach * length)].tolist()
        return found[: found.index(END)] if END in found else found


def drafted(views: Sequence[View], prompt: int, newest: Sequence[int], most: int) -> Draft:
    """What followed the longest recognised end of `newest`, up to the end of its sequence and to
    `reach` tokens for each recognised one; of views that recognise as much the first counts. All
    have the same lengths.
    """
    lengths, newest = views[0].lengths, list(newest)
    sums = sums_at(newest, lengths)
    for index in range(len(sums) - 1, -1, -1):
        length = lengths[index]
        key = key_of(prompt, sums[index], length)
        for view in views:
            found = view.after(key, newest, length, most)
            if found:
                return Draft(found, length)
    return NOTHING
