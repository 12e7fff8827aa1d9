"""Speculation for the rows of a batch: each row's draft, its acceptance, and the tokens to share
with its siblings.

Everything here is on the host. The state of a row lives while the row is in the batch, and holds
the tokens that were generated and not collected yet.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from rollstream.producers.drafts.acceptance import HistoryAgreement
from rollstream.producers.drafts.speculation import SHARE_TOKENS_MIN, DraftedSequence, Speculation
from rollstream.producers.drafts.history import prompt_key
from rollstream.producers.engines.torch.sequence import TorchSequence
from rollstream.streams.values import Floats, Tokens

LOOKBACK_ROWS = 4  # of a large batch: a row costs 0.2 ms, for each of 32 rows 7 % of all time
LOOKBACK_TOKENS = 8  # tokens of plain steps that are compared with a draft from history


@dataclass(slots=True)
class RowDrafts(DraftedSequence):
    """The newest `unsaid` tokens are not collected yet; `Sequence.tokens` holds them already."""

    tokens: list[Tokens] = field(default_factory=list[Tokens])
    logprobs: list[Floats] = field(default_factory=list[Floats])
    unsaid: int = 0

    def keep(self, tokens: Tokens, logprobs: Floats) -> None:
        """Add generated tokens, to be collected later."""
        if len(tokens):
            self.tokens.append(tokens)
            self.logprobs.append(logprobs)
            self.unsaid += len(tokens)

    def say(self) -> tuple[Tokens, Floats]:
        """Return and reset the tokens that were not collected."""
        tokens, logprobs = self.tokens, self.logprobs
        self.tokens, self.logprobs, self.unsaid = [], [], 0
        if not tokens:
            return np.zeros(0, np.uint32), np.zeros(0, np.float32)
        return np.concatenate(tokens), np.concatenate(logprobs)


@dataclass
class BatchSpeculation(Speculation):
    """Speculation of one batch."""

    states: dict[TorchSequence, RowDrafts] = field(default_factory=dict[TorchSequence, RowDrafts])
    collected: int = 0
    """How often a row's plain steps were collected."""

    def enter(self, sequence: TorchSequence) -> None:
        request = sequence.request
        prompt, least = prompt_key(request.tokens, request.sources), self.switch.rule.least
        self.states[sequence] = RowDrafts(prompt, request.group, least, sequence.length)

    def guess(self, rows: Many[TorchSequence]) -> list[list[int]]:
        """A draft for each row, perhaps empty; no draft contains the last token that the row may
        generate.
        """
        began = self.clock()
        states = [self.states[sequence] for sequence in rows]
        drafts = [self._draft(*both) for both in zip(rows, states, strict=True)]
        self.spent(states, self.clock() - began)
        lengths = self.worth(states, [len(draft) for draft in drafts], is_padded=True)
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def gain(self, sequence: TorchSequence, draft: list[int], tokens: list[int], given: Floats) -> None:
        """Record the tokens that a pass with this draft gave, and their log-probabilities."""
        state, gained = self.states[sequence], np.array(tokens, np.uint32)
        sequence.gain(gained)
        state.keep(gained, given)
        self.verified(state, draft, tokens)
        self.share(sequence)

    def drew(self, sequence: TorchSequence, tokens: Tokens, logprobs: Floats) -> None:
        """Record the newest tokens of the sequence, which plain steps gave."""
        state = self.states[sequence]
        state.keep(tokens, logprobs)
        state.how.drew(len(tokens))
        state.agreement = HistoryAgreement()

    def look_back(self, sequence: TorchSequence, gained: Tokens) -> None:
        """Compare the newest tokens, which plain steps gave, with the draft that history had for
        them. In a large batch only some rows do this.
        """
        self.collected += 1
        each = max(1, len(self.states) // LOOKBACK_ROWS)
        if self.switch.forced is None and not self.collected % each:
            came = gained[:LOOKBACK_TOKENS].tolist()
            newest = self._newest(sequence, sequence.length - len(gained))
            self.compared(self.attempt(self.states[sequence], newest, len(came)), came)

    def share(self, sequence: TorchSequence, least: int = SHARE_TOKENS_MIN) -> None:
        """Add the sequence's new tokens to the history, if there are at least `least`."""
        self.tell(self.states[sequence], sequence.tokens[: sequence.length], least)

    def _draft(self, sequence: TorchSequence, state: RowDrafts) -> list[int]:
        """The tokens that may be drafted, cut to the row's window and its remaining length."""
        most = min(state.window, sequence.limit - sequence.length - 1)
        newest = self._newest(sequence, sequence.length)
        return self.coming(state, newest, most) if most > 0 else []

    def _newest(self, sequence: TorchSequence, end: int) -> list[int]:
        """The newest of the first `end` tokens, as many as a look-up uses."""
        return sequence.tokens[max(0, end - self.source.context) : end].tolist()
