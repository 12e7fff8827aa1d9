"""The draft source contract, and the look-up in a history's memory.

An engine asks a source for drafts, and passes the tokens that it generates to it. The engine
verifies every token of a draft, so a wrong, old or torn draft costs time and never changes an
output. Prompts are identified by their tokens, not by a request, so that an engine without request
ids can use the same calls.

A look-up may run while another process writes to the memory. Whatever the memory holds, random
bytes included, a look-up stays inside of it, ends after a few slots, and returns a draft or none:
it returns tokens only from a place whose preceding tokens equal the newest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.producers.drafts.index import ngram_key, ngram_sums
from rollstream.producers.drafts.shared_memory import HEAD_WORD, PROBES, SEQUENCE_END, HistoryMemory
from rollstream.streams.values import Tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """`tokens` that may come next; `matched` of the newest tokens were found in the history (0:
    none, and then there are no `tokens`).
    """

    tokens: Sequence[int]
    matched: int


NO_DRAFT = Draft((), 0)


class DraftSource(Protocol):
    context: int
    """How many of the newest tokens a look-up uses, at most."""

    def draft(self, prompt: int, newest: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `newest` (oldest first) after this prompt."""
        ...

    def add_running(self, prompt: int, group: int, tokens: Tokens, fresh: int) -> None:
        """Add the last `fresh` of these tokens, which the engine generated after the others."""
        ...


class HistoryView:
    """Reads drafts from one memory."""

    def __init__(self, memory: HistoryMemory) -> None:
        layout = memory.layout
        self.lengths, self.size, self.reach = layout.lengths, layout.tokens_max, layout.reach
        self._mask = layout.slots - PROBES - 1
        self._words, self._tokens = memory.words, memory.tokens
        self._keys, self._places = memory.keys, memory.places

    def after(self, key: int, newest: list[int], length: int, most: int) -> list[int]:
        """The tokens after the best occurrence of the `length` newest tokens, which have this
        key.
        """
        keys, slot = self._keys, key & self._mask
        for at in range(slot, slot + PROBES):
            there = keys[at]
            if there == key:
                return self._behind(self._places[at], newest, length, most)
            if not there:  # never used, so no later slot can hold the key
                break
        return []

    def _behind(self, place: int, newest: list[int], length: int, most: int) -> list[int]:
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
    """The tokens that followed the longest match of the end of `newest`, up to the end of their
    sequence, at most `reach` tokens for each matched one. Of views that match equally many tokens
    the first one is used. All views must have the same n-gram lengths.
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
