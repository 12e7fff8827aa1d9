"""One trajectory inside the engine: its tokens on the host, and the places of its newest tokens on
the device.
"""

from typing import Literal

import numpy as np

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.draws import trajectory_key
from rollstream.streams.values import Tokens


class TorchSequence:
    """Host state of a trajectory.

    `tokens[:length]` are on the host. While the sequence is in the batch (`row` ≥ 0), newer tokens
    are in the columns of the block: first in `pieces` `(row, first column, last column)` of rows
    that it had before it moved, then in its own row from column `first` on.
    """

    __slots__ = (
        "context_max", "finish", "first", "generated", "hold", "key", "length", "limit", "pieces",
        "request", "row", "tokens",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        self.request = request
        self.key = trajectory_key(request.seed, request.trajectory)
        self.context_max = context_max
        self.length = len(request.tokens)
        self.generated = len(request.logprobs)
        self.limit = self._limit()
        self.tokens: Tokens = np.empty(max(self.limit, self.length), np.uint32)
        self.tokens[: self.length] = request.tokens
        self.hold = request.hold
        self.finish: Literal["stop", "length"] | None = None
        self.row = -1
        self.first = 0
        self.pieces: list[tuple[int, int, int]] = []

    @property
    def trajectory(self) -> str:
        return self.request.trajectory

    @property
    def prefix(self) -> Tokens:
        """The tokens that must be cached before the next step: all but the newest, which is the
        input of the step.
        """
        return self.tokens[: self.length - 1]

    @property
    def full(self) -> bool:
        return self.length >= self.limit

    def gain(self, tokens: Tokens) -> None:
        """Add generated tokens."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.generated += len(tokens)

    def take(self, tokens: Tokens) -> None:
        """Append the environment's tokens; those beyond the context are dropped."""
        kept = tokens[: max(0, self.context_max - self.length)]
        length = self.length + len(kept)
        grown: Tokens = np.empty(self.context_max, np.uint32)
        grown[: self.length] = self.tokens[: self.length]
        grown[self.length : length] = kept
        self.tokens, self.length = grown, length
        self.limit = self._limit()

    def _limit(self) -> int:
        """The length at which it ends: `tokens_max` generated tokens, or a full context."""
        left = self.request.sampling.tokens_max - self.generated
        return min(self.context_max, self.length + left)
