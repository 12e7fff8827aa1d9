"""The guesses of a batch: what each row drafts, what of it was right, what its siblings hear.

Everything here is on the host. A row's state lasts as long as it is in the batch; what it gained
and has not said waits here.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from producers.engines.drafts.chances import Agreement
from producers.engines.drafts.guessing import TELL_TOKENS, Guessed, Guessing
from producers.engines.drafts.history import prompt_key
from producers.engines.torch_engine.sequence import Sequence
from streams.records import Floats, Tokens

LOOK_ROWS = 4  # of a large batch: a row costs 0.2 ms, 7 % of all where each of 32 was asked
LOOK_BACK = 8  # tokens of a plain step that are held against what history would have guessed


@dataclass(slots=True)
class RowState(Guessed):
    """What is `unsaid` is part of `Sequence.tokens` already."""

    tokens: list[Tokens] = field(default_factory=list[Tokens])
    logprobs: list[Floats] = field(default_factory=list[Floats])
    unsaid: int = 0

    def keep(self, tokens: Tokens, logprobs: Floats) -> None:
        """Gained; to be said later."""
        if len(tokens):
            self.tokens.append(tokens)
            self.logprobs.append(logprobs)
            self.unsaid += len(tokens)

    def say(self) -> tuple[Tokens, Floats]:
        """All that is unsaid."""
        tokens, logprobs = self.tokens, self.logprobs
        self.tokens, self.logprobs, self.unsaid = [], [], 0
        if not tokens:
            return np.zeros(0, np.uint32), np.zeros(0, np.float32)
        return np.concatenate(tokens), np.concatenate(logprobs)


@dataclass
class Drafting(Guessing):
    """The rows of one batch."""

    states: dict[Sequence, RowState] = field(default_factory=dict[Sequence, RowState])
    collected: int = 0
    """Rows whose plain steps were collected."""

    def enter(self, sequence: Sequence) -> None:
        request = sequence.request
        prompt, least = prompt_key(request.tokens, request.sources), self.switch.rule.least
        self.states[sequence] = RowState(prompt, request.group, least, sequence.length)

    def guess(self, rows: Many[Sequence]) -> list[list[int]]:
        """A draft for each row, perhaps an empty one; none reaches the row's last possible
        token.
        """
        began = self.clock()
        states = [self.states[sequence] for sequence in rows]
        drafts = [self._draft(*both) for both in zip(rows, states, strict=True)]
        self.spent(states, self.clock() - began)
        lengths = self.worth(states, [len(draft) for draft in drafts], is_padded=True)
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def gain(self, sequence: Sequence, draft: list[int], tokens: list[int], given: Floats) -> None:
        """What a row gained from a pass with this draft, and its log-probabilities."""
        state, gained = self.states[sequence], np.array(tokens, np.uint32)
        sequence.gain(gained)
        state.keep(gained, given)
        self.verified(state, draft, tokens)
        self.share(sequence)

    def drew(self, sequence: Sequence, tokens: Tokens, logprobs: Floats) -> None:
        """Plain steps gave these, the newest tokens of the sequence."""
        state = self.states[sequence]
        state.keep(tokens, logprobs)
        state.how.drew(len(tokens))
        state.agreement = Agreement()

    def look_back(self, sequence: Sequence, gained: Tokens) -> None:
        """How right history would have been about what plain steps just gave: the newest tokens of
        the sequence. Of a large batch not every row is asked.
        """
        self.collected += 1
        each = max(1, len(self.states) // LOOK_ROWS)
        if self.switch.forced is None and not self.collected % each:
            came = gained[:LOOK_BACK].tolist()
            newest = self._newest(sequence, sequence.length - len(gained))
            self.compared(self.attempt(self.states[sequence], newest, len(came)), came)

    def share(self, sequence: Sequence, least: int = TELL_TOKENS) -> None:
        """With its siblings, if at least so many tokens are new to them."""
        self.tell(self.states[sequence], sequence.tokens[: sequence.length], least)

    def _draft(self, sequence: Sequence, state: RowState) -> list[int]:
        """What its window and the rest of its length leave of what may come."""
        most = min(state.window, sequence.limit - sequence.length - 1)
        newest = self._newest(sequence, sequence.length)
        return self.coming(state, newest, most) if most > 0 else []

    def _newest(self, sequence: Sequence, end: int) -> list[int]:
        """Of its first `end` tokens."""
        return sequence.tokens[max(0, end - self.source.context) : end].tolist()
