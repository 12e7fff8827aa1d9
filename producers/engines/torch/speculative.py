"""Speculative decoding of a batch while `gate` measures it to be faster. Tokens are those of
`DecodeBatch`, up to rounding.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.drafting import DraftSource
from rollstream.producers.engines.torch.batch import DecodeBatch
from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.draft_verify import (
    BatchSpeculation,
    count_accepted,
    pack_drafts,
)
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.producers.engines.torch.sampling import draw_tokens
from rollstream.streams.values import Drafts, Floats, Tokens

MEASURE_STEPS = 4  # one plain step in this many is measured while drafts are off
MEASURE_STEPS_HOPELESS = 16  # the same, while drafts are too seldom accepted to be tried
SQUEEZE_FACTOR = 16
"""Hidden columns are removed once attention has read more of them than this many times the cached
tokens: reading them has then cost as much as removing them.
"""


class SpeculativeBatch(DecodeBatch):
    """While `is_verifying`, generated tokens are on the host, in the row states of `drafting`.

    Rows gain different numbers of tokens in a pass. All rows advance by the largest number, and
    each row's mask hides its columns beyond its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        context_max: int,
        block_steps: int,
        source: DraftSource,
        gate: DraftGate,
    ) -> None:
        super().__init__(decoder, slots, context_max, block_steps)
        self.gate, self.block_steps = gate, block_steps
        self.is_verifying = False
        # On a CPU other processes lengthen wall-clock time, but not the time of this thread.
        on_cpu = decoder.device.type == "cpu"
        self._clock: Callable[[], float] = time.thread_time if on_cpu else time.perf_counter
        self.drafting = BatchSpeculation(source, gate, decoder.vocabulary, self._clock)
        self._hidden_read = 0
        """Hidden columns read since they were last removed."""
        self._plain_left = 0
        """Unmeasured plain steps before the next measured one; the gate decides before that."""
        self._drawn = 0
        """Tokens collected last from a row that `drafting` has no state of."""

    @property
    def drafts(self) -> DraftStats:
        return self.drafting.stats()

    @property
    def emission_due(self) -> bool:
        if not self.is_verifying:
            return self.block.full
        return any(state.pending >= self.block_steps for state in self.drafting.states.values())

    @property
    def tokens_cached(self) -> int:
        if not self.is_verifying:
            return super().tokens_cached
        return sum(sequence.length - 1 for sequence in self.rows)

    def enter(self, sequence: TorchSequence, kv: torch.Tensor | None) -> None:
        super().enter(sequence, kv)
        self.drafting.enter(sequence)

    def leave(self, sequence: TorchSequence) -> None:
        super().leave(sequence)
        self.drafting.leave(sequence)

    def cached(self, sequence: TorchSequence) -> torch.Tensor:
        if not self.is_verifying:
            return super().cached(sequence)
        kv = self.cache.seen(sequence.row, int(self._starts[sequence.row]))
        assert kv.shape[2] == sequence.length - 1, "every token but the newest is cached once"
        return kv

    def recache(self, sequence: TorchSequence, kv: torch.Tensor | None) -> None:
        if self.is_verifying:
            self._starts[sequence.row] = self.cache.write(sequence.row, kv)
            self._composed = False
        else:
            super().recache(sequence, kv)

    def collect(self, sequence: TorchSequence) -> tuple[Tokens, Floats]:
        tokens, logprobs = super().collect(sequence)
        if len(tokens):
            self.drafting.compare_with_history(sequence, tokens)
        state = self.drafting.states.get(sequence)
        if state is None:
            self._drawn = len(tokens)
            return tokens, logprobs
        if len(tokens):
            self.drafting.add_drawn(sequence, tokens, logprobs)
        return state.take()

    def drafted(self, sequence: TorchSequence) -> Drafts | None:
        state = self.drafting.states.get(sequence)
        if state is None:
            return Drafts((self._drawn,), self._drawn, 0, 0, 0, 0.0)
        return state.statistics.take()

    def restart_block(self) -> None:
        if not self.is_verifying:
            super().restart_block()

    def step(self) -> list[TorchSequence]:
        """Make one pass or one plain step. Returns the sequences that ended, with `finish` set."""
        if self._plain_left:
            self._plain_left -= 1
            return super().step()
        self._decide()
        if self.is_verifying:
            return self._verify()
        rows, began = len(self.rows), self._clock()
        ended = super().step()
        self.gate.add_plain_steps(rows, self._clock() - began)
        self._plain_left = self._steps_between - 1
        return ended

    # ---- the gate ----------------------------------------------------------------------------

    @property
    def _steps_between(self) -> int:
        # All passes are measured, and the plain steps of a probe.
        if self.is_verifying or self.gate.probing:
            return 1
        return MEASURE_STEPS_HOPELESS if self.gate.is_hopeless else MEASURE_STEPS

    def _decide(self) -> None:
        drafts = self.drafting.decide(len(self.rows), self.is_verifying, self._steps_between)
        if drafts and not self.is_verifying:
            self._begin_verifying()
        elif self.is_verifying and not drafts:
            self._begin_plain()

    def _begin_verifying(self) -> None:
        # Each later pass adds its tokens on the host itself.
        for sequence in self.rows:
            self.drafting.add_drawn(sequence, *super().collect(sequence))
        super().restart_block()
        self.is_verifying = True
        for sequence in self.rows:
            self.drafting.share(sequence, tokens_min=0)

    def _begin_plain(self) -> None:
        self._squeeze(0)
        self.is_verifying = False
        # A new block, with the newest token of each row.
        self.block.column = 0
        for sequence in self.rows:
            sequence.first, sequence.pieces = 1, []
            newest = sequence.length - 1
            self.block.enter(sequence.row, int(sequence.tokens[newest]), sequence.key, newest)
        rows = len(self.rows)
        ends = self._starts[:rows] + self._limits[:rows] - 1
        self._next_end = int(ends.min(initial=2**62))

    # ---- verification --------------------------------------------------------------------------

    def _verify(self) -> list[TorchSequence]:
        """1. Make room in the cache. 2. Look up a draft for each row. 3. Run one forward pass over
        the newest token and the draft of each row, and draw the token after each of these. 4. Add
        to each row the drafted tokens that equal the drawn ones, and one drawn token more.
        """
        began = self._clock()
        if self.cache.column + 1 + self.gate.rule.most > self.cache.columns:  # 1
            self._squeeze(0)
        if self.cache.column >= self._next_promotion:
            self._promote()
        if not self._composed:
            self._compose()
        drafts = self.drafting.make_drafts(self.rows)  # 2
        drafted, row_of, drawn = pack_drafts(self.rows, drafts, self.decoder.device)
        if self.decoder.adapters is not None:
            counts = [1 + len(draft) for draft in drafts]
            versions = [sequence.request.version for sequence in self.rows]
            drafted = replace(drafted, routes=self.decoder.adapters.routes(versions, counts))
        if drafted.ahead == 1:  # 3
            logits = self.decoder.step(
                drafted.ids, drafted.positions, self.cache, self._used, drafted.routes
            )
        else:
            logits = self.decoder.verify(drafted, self.cache, self._used)
        plan = self._plan.of_tokens(row_of)
        tokens, logprobs = draw_tokens(logits, plan, drawn)
        rows = len(self.rows)
        ended = self._take(drafts, tokens[:, 0].tolist(), logprobs[:, 0].cpu().numpy())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]  # 4
        self.gate.add_pass(rows, len(drafted.ids), self.gained, self._clock() - began)
        return ended

    def _take(
        self, drafts: list[list[int]], drawn: list[int], logprobs: Floats
    ) -> list[TorchSequence]:
        ended: list[TorchSequence] = []
        gained: list[int] = []
        begin = 0
        for sequence, draft in zip(self.rows, drafts, strict=True):
            # One token more is drawn than drafted.
            end = begin + 1 + len(draft)
            row_tokens = drawn[begin:end]
            count, stopped = count_accepted(row_tokens, draft, sequence.request.sampling.stop)
            self.drafting.add_gained(
                sequence, draft, row_tokens[:count], logprobs[begin : begin + count]
            )
            if stopped or not sequence.room:
                sequence.finish = "stop" if stopped else "length"
                ended.append(sequence)
            gained.append(count)
            begin = end
        self._advance(gained)
        return ended

    def _advance(self, gained: list[int]) -> None:
        gained_max, rows = max(gained), len(gained)
        if min(gained) < gained_max:
            # Columns beyond the tokens that the row gained.
            self.cache.hide(rows, torch.tensor(gained, device=self.decoder.device), gained_max)
        self.cache.column += gained_max
        self.gained = sum(gained)
        counts = self.drafting.counts
        counts["passes"] += 1
        counts["rows"] += rows
        counts["gained"] += self.gained
        columns = rows * self.cache.column - int(self._starts[:rows].sum())
        cached = self.tokens_cached
        self._hidden_read += columns - cached
        if self._hidden_read > SQUEEZE_FACTOR * cached:
            self._squeeze(0)

    # ---- the cache -----------------------------------------------------------------------------

    def _align(self, column: int) -> None:
        if self.is_verifying:
            self._squeeze(column)
        else:
            super()._align(column)

    def _squeeze(self, column: int) -> None:
        copies = [self.cached(sequence) for sequence in self.rows]
        # The longest row's length, and at least `column`.
        self.cache.column = max([column, *(kv.shape[2] for kv in copies)])
        for sequence, kv in zip(self.rows, copies, strict=True):
            self._starts[sequence.row] = self.cache.write(sequence.row, kv)
        self._hidden_read = 0
        self._next_promotion = 0  # computed again at the next step
        self._composed = False
