"""The batch that `torch` decodes. Each row draws from its trajectory's own random sequence: other
rows affect only the rounding of its numbers (invariant 10).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.torch.adapters import AdapterRoutes
from rollstream.producers.engines.torch.attention import KVCache
from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.rows import (
    RowLayout,
    RowMove,
    RowSegment,
    TokenBuffer,
    TorchSequence,
    length_classes,
    row_segments,
)
from rollstream.producers.engines.torch.sampling import (
    SamplingPlanCache,
    draw_tokens,
    plan_sampling,
)
from rollstream.streams.values import Drafts, Floats, Sampling, Tokens


class DecodeBatch:
    """Decodes at most `slots` sequences. Generated tokens stay on the device in a block of
    `block_steps` steps. When it is full (`emission_due`), the caller copies the tokens of every
    sequence by `collect` and calls `restart_block`.
    """

    def __init__(self, decoder: Decoder, slots: int, context_max: int, block_steps: int) -> None:
        self.decoder = decoder
        self.cache = KVCache(decoder.kv, slots, context_max, decoder.dtype, decoder.device)
        self.block = TokenBuffer(block_steps, slots + 1, decoder.device)
        overhead = decoder.segment_overhead_tokens
        self.overhead = 2**62 if overhead is None else overhead  # 2^62: always one segment
        self.order = RowLayout(() if overhead is None else length_classes(context_max), slots)
        self.rows: list[TorchSequence] = []
        self._starts: NDArray[np.int64] = np.zeros(slots + 1, np.int64)
        self._limits: NDArray[np.int64] = np.zeros(slots + 1, np.int64)
        self._positions = torch.zeros(slots, dtype=torch.int64, device=decoder.device)
        self._plans = SamplingPlanCache(decoder.device)
        self._plan = plan_sampling([Sampling()], decoder.device)
        self._composed = False
        # Tokens of the newest step, over all rows.
        self.gained = 0
        # Ranges of rows, each with the column from which attention reads it.
        self._used: tuple[RowSegment, ...] = ()
        # Which LoRA adapter serves which rows; None without adapters.
        self._routes: AdapterRoutes | None = None
        # Lower bounds: before the cache reaches these columns, no row reaches its length limit or
        # outgrows its length class.
        self._next_end = self._next_promotion = 2**62

    @property
    def drafts(self) -> DraftStats:
        # This batch makes no drafts.
        return DraftStats()

    @property
    def emission_due(self) -> bool:
        return self.block.full

    @property
    def tokens_cached(self) -> int:
        return len(self.rows) * self.cache.column - int(self._starts[: len(self.rows)].sum())

    def enter(self, sequence: TorchSequence, kv: torch.Tensor | None) -> None:
        """Give a sequence a row. `kv` is the KV of all its tokens but the newest, the input of the
        next step; None without others.
        """
        length = 0 if kv is None else kv.shape[2]
        if not self.rows:
            self.cache.column, self._next_end, self._next_promotion = 0, 2**62, 2**62
        if self.cache.column < length:
            self._align(length)
        region = self.order.region(length)
        row, moves = self.order.insert(region)
        self.rows.append(sequence)  # moved to its own row below
        self._move(moves)
        self.rows[row] = sequence
        sequence.row, sequence.first, sequence.pieces = row, self.block.column + 1, []
        start = self.cache.write(row, kv)
        self._starts[row], self._limits[row] = start, sequence.limit
        self._next_end = min(self._next_end, start + sequence.limit - 1)
        if region:
            outgrown = start + int(self.order.ceilings[region]) + 1
            self._next_promotion = min(self._next_promotion, outgrown)
        self.block.enter(row, int(sequence.tokens[length]), sequence.key, length)
        self._plans.enter(sequence.request.sampling)
        self._composed = False

    def leave(self, sequence: TorchSequence) -> None:
        """Remove a sequence. Call `collect` before: tokens that are not collected are lost."""
        # No row may be unused between used ones.
        self._move(self.order.remove(sequence.row))
        self.rows.pop()
        sequence.row = -1
        self._plans.leave(sequence.request.sampling)
        self._composed = False

    def cached(self, sequence: TorchSequence) -> torch.Tensor:
        return self.cache.read(sequence.row, int(self._starts[sequence.row]))

    def recache(self, sequence: TorchSequence, kv: torch.Tensor | None) -> None:
        """Replace the KV by one of the same length, computed under new weights."""
        start = self.cache.write(sequence.row, kv)
        assert start == self._starts[sequence.row], "the KV of a running row changed its length"

    def collect(self, sequence: TorchSequence) -> tuple[Tokens, Floats]:
        """Returns a sequence's tokens since its last `collect`, and their log-probabilities."""
        pieces = sequence.pieces
        if sequence.first <= self.block.column:
            pieces.append((sequence.row, sequence.first, self.block.column))
        sequence.pieces, sequence.first = [], self.block.column + 1
        if not pieces:
            return np.zeros(0, np.uint32), np.zeros(0, np.float32)
        tokens, logprobs = self.block.read(pieces)
        sequence.gain(tokens)
        return tokens, logprobs

    def drafted(self, sequence: TorchSequence) -> Drafts | None:
        return None

    def change_adapters(self) -> None:
        """Map rows to adapters again in the next step, after adapters were loaded or dropped."""
        self._composed = False

    def restart_block(self) -> None:
        rows = len(self.rows)
        keys = np.array([sequence.key for sequence in self.rows], np.uint64)
        self.block.restart(keys, self.cache.column - self._starts[:rows])
        self.block.push()
        for sequence in self.rows:
            sequence.first = 1

    def step(self) -> list[TorchSequence]:
        """Returns the sequences whose turn ended, with `finish` set; they stay until `leave`."""
        assert self.rows, "nothing to step"
        assert not self.block.full, "restart the block first"
        if self.cache.column == self.cache.columns:
            self._align(max(self.cache.column - segment.column for segment in self._segments()))
        if self.cache.column >= self._next_promotion:
            self._promote()
        if not self._composed:
            self._compose()
        rows, plan = len(self.rows), self._plan
        positions = self._positions[:rows]
        ids = self.block.inputs(rows)
        logits = self.decoder.step(ids, positions, self.cache, self._used, self._routes)
        tokens, logprobs = draw_tokens(logits, plan, self.block.next_uniforms(rows))
        self.block.append(tokens, logprobs)
        positions.add_(1)
        self.cache.column += 1
        self.gained = rows
        return self._ended((tokens[:, 0] == plan.stops).nonzero())

    def _ended(self, stopped: torch.Tensor) -> list[TorchSequence]:
        ended: list[TorchSequence] = []
        if len(stopped):
            # (stop token, row) indices of the newest tokens.
            for row in set(stopped[:, 1].tolist()):  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownVariableType]
                self.rows[row].finish = "stop"
                ended.append(self.rows[row])  # pyright: ignore[reportUnknownArgumentType]
        if self.cache.column >= self._next_end:
            ends = self._starts[: len(self.rows)] + self._limits[: len(self.rows)] - 1
            full = ends <= self.cache.column
            self._next_end = int(ends[~full].min(initial=2**62))
            for row in np.flatnonzero(full).tolist():
                if self.rows[row].finish is None:
                    self.rows[row].finish = "length"
                    ended.append(self.rows[row])
        return ended

    def _compose(self) -> None:
        rows = len(self.rows)
        self._used = self._segments()
        positions = torch.from_numpy(self.cache.column - self._starts[:rows])  # pyright: ignore[reportUnknownMemberType]
        self._positions[:rows].copy_(positions)
        self.block.push()
        self._plan = self._plans.plan(sequence.request.sampling for sequence in self.rows)
        if self.decoder.adapters is not None:
            self._routes = self.decoder.adapters.routes([row.request.version for row in self.rows])
        self._composed = True

    def _promote(self) -> None:
        self._composed = False
        self._next_promotion = 2**62
        begin = self.order.counts[0]
        for region in range(1, len(self.order.counts)):
            ceiling = int(self.order.ceilings[region])
            end = begin + self.order.counts[region]
            # Rows that outgrew their length class join the region of the next longer one.
            grown = np.flatnonzero(self.cache.column - self._starts[begin:end] > ceiling) + begin
            for row in grown.tolist():
                self._move(self.order.promote(row, region))
            begin += len(grown)
            if begin < end:
                oldest = int(self._starts[begin:end].min())
                # The column at which the next row may outgrow its class.
                self._next_promotion = min(self._next_promotion, oldest + ceiling + 1)
            begin = end

    def _segments(self) -> tuple[RowSegment, ...]:
        columns: list[int] = []
        begin = 0
        for count in self.order.counts:
            starts = self._starts[begin : begin + count]
            # Attention reads the region from its longest row's first column.
            columns.append(int(starts.min()) if count else 0)
            begin += count
        return row_segments(self.order.counts, columns, self.overhead)

    def _move(self, moves: list[RowMove]) -> None:
        # The sequence in the spare row, which a swap uses, is not in `rows`.
        spare: TorchSequence | None = None
        for source, target in moves:
            self.cache.move(source, target, int(self._starts[source]))
            self.block.move(source, target)
            self._starts[target] = self._starts[source]
            self._limits[target] = self._limits[source]
            sequence = spare if source == self.order.spare else self.rows[source]
            assert sequence is not None
            if target == self.order.spare:
                spare = sequence
                continue
            self._leave_piece(sequence, source)
            self.rows[target] = sequence
            sequence.row = target

    def _leave_piece(self, sequence: TorchSequence, source: int) -> None:
        newest = self.block.column
        if sequence.first < newest:
            # `collect` finds the older tokens in the row that the sequence left.
            sequence.pieces.append((sequence.row, sequence.first, newest - 1))
        # The newest token moved with the sequence: the next sequence in row `source` overwrites the
        # copy there.
        sequence.first = max(sequence.first, newest)

    def _align(self, column: int) -> None:
        used = self._segments() if self.rows else ()
        rows = len(self.rows)
        shift = self.cache.align(column, used, self._starts[:rows].tolist())
        self._starts[:rows] += shift
        self._next_end += shift
        self._next_promotion += shift
        self._composed = False
