"""Turns partials of running trajectories, of all rollouts, into draft history (the siblings of
Seer).

A partial holds new tokens but not the prompt, so the prompts of the groups are read too. The last
few tokens of each trajectory are kept, so that patterns reach across the boundary of two partials.
A partial whose group or predecessor is unknown is used as far as possible on its own.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollstream.producers.drafts.history import HistoryAnswer, prompt_key
from rollstream.producers.drafts.topic_follower import TopicFollower
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import PROMPT, Partial, Prompt, Record
from rollstream.streams.values import Tokens

GROUPS_MAX = 4096  # prompts kept: open groups are among the newest
RUNNING_MAX = 8192  # trajectories whose last tokens are kept
POLL_PROMPTS_MAX, POLL_PARTIALS_MAX = 256, 32  # records per poll, between two polls of the engine
BEHIND_MAX = 512  # partials; older ones belong to answers that are finished or nearly so


@dataclass(frozen=True, slots=True)
class _GroupPrompt:
    """A group's prompt: its key, its number of tokens, and its last few tokens."""

    key: int
    length: int
    end: Tokens


@dataclass(slots=True)
class PartialFeed:
    """`context` tokens before a partial are part of its patterns."""

    bus: Bus
    context: int
    _prompts: TopicFollower = field(init=False)
    _partials: TopicFollower = field(init=False)
    _group_prompts: OrderedDict[int, _GroupPrompt] = field(default_factory=OrderedDict[int, _GroupPrompt])
    _ends: OrderedDict[str, tuple[int, Tokens]] = field(
        default_factory=OrderedDict[str, tuple[int, Tokens]]
    )
    """Per trajectory: its length, and its last few tokens."""

    def __post_init__(self) -> None:
        self._prompts = TopicFollower(self.bus, self.bus, "prompts", GROUPS_MAX)
        self._partials = TopicFollower(self.bus, self.bus, "partials", BEHIND_MAX)

    def poll(self) -> list[HistoryAnswer]:
        """Return the pieces that arrived since the last call, a bounded number."""
        for record in self._prompts.poll(POLL_PROMPTS_MAX):
            if isinstance(record, Prompt):
                self._add_prompt(record)
        partials = self._partials.poll(POLL_PARTIALS_MAX)
        if len(partials) == POLL_PARTIALS_MAX:
            self._partials.skip_if_behind(BEHIND_MAX)
        return self.pieces(partials)

    def pieces(self, records: Sequence[Record]) -> list[HistoryAnswer]:
        """The pieces in `records` whose groups are known."""
        found = [self._piece(one) for one in records if isinstance(one, Partial)]
        return [piece for piece in found if piece is not None and piece.fresh]

    def finished(self, trajectory: str) -> None:
        """Drop the state of a finished trajectory."""
        self._ends.pop(trajectory, None)

    def readers(self) -> list[TopicReader]:
        return [self._prompts.reader, self._partials.reader]

    def _add_prompt(self, prompt: Prompt) -> None:
        tokens = prompt.tokens
        key = prompt_key(tokens, np.full(len(tokens), PROMPT, np.uint8))
        self._group_prompts[prompt.group] = _GroupPrompt(key, len(tokens), tokens[-self.context :].copy())
        while len(self._group_prompts) > GROUPS_MAX:
            self._group_prompts.popitem(last=False)

    def _piece(self, partial: Partial) -> HistoryAnswer | None:
        asked = self._group_prompts.get(partial.group)
        if asked is None:
            return None
        known, before = self._ends.pop(partial.trajectory, (asked.length, asked.end))
        if known != partial.start:  # another attempt, or skipped partials
            before = asked.end if partial.start == asked.length else before[:0]
        tokens = np.concatenate((before, partial.tokens))
        end = partial.start + len(partial.tokens)
        self._ends[partial.trajectory] = (end, tokens[-self.context :].copy())
        while len(self._ends) > RUNNING_MAX:
            self._ends.popitem(last=False)
        return HistoryAnswer(asked.key, partial.group, tokens, len(partial.tokens), runs=True)
