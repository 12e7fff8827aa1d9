"""At each position of a verification pass the token is drawn that a plain step would draw; a
drafted token is accepted if it is that one.
"""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollstream.producers.drafts.history import prompt_key
from rollstream.producers.drafts.planner import HistoryAgreement
from rollstream.producers.drafts.speculation import SHARE_TOKENS_MIN, DraftedSequence, Speculation
from rollstream.producers.engines.randomness import uniforms
from rollstream.producers.engines.torch.decoder import DraftedTokens
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.streams.values import Floats, Tokens

LOOKBACK_SHARE = 0.002  # share of all time that `compare_with_history` may take
LOOKBACK_TOKENS = 8  # tokens that it compares with a draft, at most


@dataclass(slots=True)
class RowDrafts(DraftedSequence):
    """`pending` are the newest tokens, not collected yet; `TorchSequence.tokens` holds them
    already.
    """

    tokens: list[Tokens] = field(default_factory=list[Tokens])
    logprobs: list[Floats] = field(default_factory=list[Floats])
    pending: int = 0

    def keep(self, tokens: Tokens, logprobs: Floats) -> None:
        if len(tokens):
            self.tokens.append(tokens)
            self.logprobs.append(logprobs)
            self.pending += len(tokens)

    def take(self) -> tuple[Tokens, Floats]:
        tokens, logprobs = self.tokens, self.logprobs
        self.tokens, self.logprobs, self.pending = [], [], 0
        if not tokens:
            return np.zeros(0, np.uint32), np.zeros(0, np.float32)
        return np.concatenate(tokens), np.concatenate(logprobs)


@dataclass
class BatchSpeculation(Speculation):
    states: dict[TorchSequence, RowDrafts] = field(default_factory=dict[TorchSequence, RowDrafts])
    """From a row's first draft until it leaves the batch."""
    entry_lengths: dict[TorchSequence, int] = field(default_factory=dict[TorchSequence, int])
    lookback_from_s: float = -math.inf
    """The time from which plain steps are compared with history again."""

    def enter(self, sequence: TorchSequence) -> None:
        self.entry_lengths[sequence] = sequence.length

    def leave(self, sequence: TorchSequence) -> None:
        del self.entry_lengths[sequence]
        self.states.pop(sequence, None)

    def state(self, sequence: TorchSequence) -> RowDrafts:
        state = self.states.get(sequence)
        if state is None:
            request, window = sequence.request, self.gate.rule.least
            prompt = prompt_key(request.tokens, request.sources)
            state = RowDrafts(prompt, request.group, window, self.entry_lengths[sequence])
            self.states[sequence] = state
        return state

    def make_drafts(self, rows: Many[TorchSequence]) -> list[list[int]]:
        """Returns a draft for each row, perhaps empty, with fewer tokens than the row may still
        generate.
        """
        began = self.clock()
        states = [self.state(sequence) for sequence in rows]
        drafts = [self._draft(*both) for both in zip(rows, states, strict=True)]
        self.add_lookup_time(states, self.clock() - began)
        lengths = self.choose_lengths(states, [len(draft) for draft in drafts], is_padded=True)
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def add_gained(
        self, sequence: TorchSequence, draft: list[int], tokens: list[int], logprobs: Floats
    ) -> None:
        state, gained = self.states[sequence], np.array(tokens, np.uint32)
        sequence.gain(gained)
        state.keep(gained, logprobs)
        self.add_verified(state, draft, tokens)
        self.share(sequence)

    def add_drawn(self, sequence: TorchSequence, tokens: Tokens, logprobs: Floats) -> None:
        state = self.state(sequence)
        state.keep(tokens, logprobs)
        state.statistics.add_drawn(len(tokens))
        state.agreement = HistoryAgreement()

    def compare_with_history(self, sequence: TorchSequence, gained: Tokens) -> None:
        """Estimate the acceptance rate from plain steps: compare the newest tokens with history's
        draft.
        """
        if self.gate.forced is not None or (began_s := self.clock()) < self.lookback_from_s:
            return
        came = gained[:LOOKBACK_TOKENS].tolist()
        newest = self._newest(sequence, sequence.length - len(gained))
        prompt = prompt_key(sequence.request.tokens, sequence.request.sources)
        self.add_trial(self.look_up_trial(prompt, newest, len(came)), came)
        end_s = self.clock()
        # So comparisons take at most `LOOKBACK_SHARE` of the time.
        self.lookback_from_s = end_s + (end_s - began_s) / LOOKBACK_SHARE

    def share(self, sequence: TorchSequence, tokens_min: int = SHARE_TOKENS_MIN) -> None:
        self.share_tokens(self.state(sequence), sequence.tokens[: sequence.length], tokens_min)

    def _draft(self, sequence: TorchSequence, state: RowDrafts) -> list[int]:
        # A pass gives one token more than it accepts.
        tokens_max = min(state.window, sequence.limit - sequence.length - 1)
        newest = self._newest(sequence, sequence.length)
        return self.propose(state, newest, tokens_max) if tokens_max > 0 else []

    def _newest(self, sequence: TorchSequence, end: int) -> list[int]:
        return sequence.tokens[max(0, end - self.source.context) : end].tolist()


def pack_drafts(
    rows: Many[TorchSequence], drafts: Many[Many[int]], device: torch.device
) -> tuple[DraftedTokens, torch.Tensor, torch.Tensor]:
    """Packs each row's newest token, whose KV is not cached yet, and its draft: n tokens. Returns
    also the row of each (n,) and the uniform number that draws the token after it (n, 1).
    """
    counts = np.array([1 + len(draft) for draft in drafts])
    ahead = int(counts.max())
    ids: list[int] = []
    for sequence, draft in zip(rows, drafts, strict=True):
        ids.append(int(sequence.tokens[sequence.length - 1]))
        ids += draft
    row_of = np.repeat(np.arange(len(rows)), counts)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    newest = np.array([sequence.length - 1 for sequence in rows])
    positions: NDArray[np.int64] = newest[row_of] + place
    keys = np.array([sequence.key for sequence in rows], np.uint64)[row_of]
    slots = None  # every row has `ahead` tokens, so none is padded
    if len(ids) < ahead * len(rows):
        slots = torch.from_numpy(row_of * ahead + place).to(device)  # pyright: ignore[reportUnknownMemberType]
    drafted = DraftedTokens(
        ids=torch.tensor(ids, device=device),
        positions=torch.from_numpy(positions).to(device),  # pyright: ignore[reportUnknownMemberType]
        slots=slots,
        rows=len(rows),
        ahead=ahead,
    )
    # The uniform number that a plain step would use at each position.
    drawn = torch.from_numpy(uniforms(keys, positions + 1)).to(device)  # pyright: ignore[reportUnknownMemberType]
    return drafted, torch.from_numpy(row_of).to(device), drawn.unsqueeze(1)  # pyright: ignore[reportUnknownMemberType]


def count_accepted(drawn: Many[int], draft: Many[int], stop: Many[int]) -> tuple[int, bool]:
    """Returns how many of the `drawn` tokens the row gains, and whether the last of them is a stop
    token: the accepted ones and the one after them, but none after a stop token.

    `drawn` has one token more than `draft`. Drafted tokens are accepted up to the first that
    differs, which has the distribution and the acceptance rate of rejection sampling (Leviathan,
    Kalman, Matias, ICML 2023) for drafts of probability 1.
    """
    for index, token in enumerate(drawn):
        if token in stop:
            return index + 1, True
        if index == len(draft) or token != draft[index]:
            return index + 1, False
    raise AssertionError("one token more is drawn than was drafted")
