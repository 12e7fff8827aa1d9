"""One trajectory inside the engine: its tokens so far and where its newest ones still lie on the
device.
"""

from typing import Literal

import numpy as np

from producers.engines.base import Request
from producers.engines.draws import trajectory_key
from streams.records import Tokens


class Sequence:
    """Host state of a trajectory.

    `tokens[:length]` is known on the host. In the batch (`row` ≥ 0) more lie in the block's
    columns: closed `pieces` `(row, first column, last column)`, left behind when it moved, then its
    own row from `first` on.
    """

    __slots__ = (
        "context_max", "finish", "first", "generated", "hold", "key", "length", "limit", "pieces",
        "request", "row", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, context_max: int) -> None:
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
        """What has to be cached before the next step: all tokens but the newest, which the step
        takes as input.
        """
        return self.tokens[: self.length - 1]

    @property
    def full(self) -> bool:
        return self.length >= self.limit

    def gain(self, tokens: Tokens) -> None:
        """Tokens that the engine generated."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.generated += len(tokens)

    def take(self, tokens: Tokens) -> None:
        """Tokens of the environment; at most as many as the context still holds are of use."""
        kept = tokens[: max(0, self.context_max - self.length)]
        length = self.length + len(kept)
        grown: Tokens = np.empty(self.context_max, np.uint32)
        grown[: self.length] = self.tokens[: self.length]
        grown[self.length : length] = kept
        self.tokens, self.length = grown, length
        self.limit = self._limit()

    def _limit(self) -> int:
        """Length at which it ends: `tokens_max` generated tokens, or the context is full."""
        left = self.request.sampling.tokens_max - self.generated
        return min(self.context_max, self.length + left)
