"""The newest generated tokens, on the device: a block of steps × rows, copied to the host on
demand.

Column 0 is copied from the last column of the previous block. The newest column of a row holds the
token that is the input of its next step.
"""

# pyright: reportUnknownMemberType=false

import numpy as np
import torch
from numpy.typing import NDArray

from rollstream.producers.engines.draws import uniforms
from rollstream.streams.values import Floats, Tokens


class TokenBuffer:
    """`column` is the newest filled column; `steps` columns fit beside column 0."""

    def __init__(self, steps: int, rows: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        self.column = 0
        self.tokens = torch.zeros(steps + 1, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(steps + 1, rows, dtype=torch.float32, device=device)
        self._drawn: NDArray[np.float64] = np.zeros((steps + 1, rows))
        self._uniforms = torch.from_numpy(self._drawn).to(device)  # shares memory on a CPU
        self._on_host: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    @property
    def full(self) -> bool:
        return self.column == self.steps

    def inputs(self, rows: int) -> torch.Tensor:
        """(rows,) input tokens of the next step."""
        return self.tokens[self.column, :rows]

    def next_uniforms(self, rows: int) -> torch.Tensor:
        """(rows, 1) uniforms with which the next step draws its tokens."""
        return self._uniforms[self.column + 1, :rows, None]

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Add the (rows, 1) tokens and log-probabilities of one step."""
        self.column += 1
        rows = tokens.shape[0]
        self.tokens[self.column, :rows] = tokens[:, 0]
        self.logprobs[self.column, :rows] = logprobs[:, 0]
        self._on_host = None

    def enter(self, row: int, token: int, key: int, position: int) -> None:
        """Set a new sequence's newest token, at index `position` of the trajectory, as the next
        input of `row`.
        """
        self.tokens[self.column, row] = token
        self._draw(slice(row, row + 1), np.array([key], np.uint64), np.array([position]))

    def move(self, source: int, target: int) -> None:
        """Move the state that a row's next steps need; its earlier columns stay in `source`."""
        self.tokens[self.column, target] = self.tokens[self.column, source]
        self.logprobs[self.column, target] = self.logprobs[self.column, source]
        self._drawn[self.column + 1 :, target] = self._drawn[self.column + 1 :, source]
        self._on_host = None

    def restart(self, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        """Empty the block and keep the newest column as column 0; `positions` are the indices of
        the newest tokens.
        """
        rows = len(keys)
        self.tokens[0, :rows] = self.tokens[self.column, :rows]
        self.column = 0
        self._on_host = None
        self._draw(slice(0, rows), keys, positions)

    def push(self) -> None:
        """Copy the drawn uniforms to the device; call it after any `enter`, `move` or `restart`."""
        if self.device.type != "cpu":
            self._uniforms.copy_(torch.from_numpy(self._drawn), non_blocking=True)

    def read(self, pieces: list[tuple[int, int, int]]) -> tuple[Tokens, Floats]:
        """Tokens and log-probabilities of pieces `(row, first column, last column)`, joined."""
        if self._on_host is None:
            end = self.column + 1
            self._on_host = (
                self.tokens[:end].cpu().numpy(),
                self.logprobs[:end].cpu().numpy(),
            )
        tokens, logprobs = self._on_host
        return (
            np.concatenate([tokens[a : b + 1, row] for row, a, b in pieces]).astype(np.uint32),
            np.concatenate([logprobs[a : b + 1, row] for row, a, b in pieces]),
        )

    def _draw(self, rows: slice, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        ahead = np.arange(1, self.steps - self.column + 1)
        self._drawn[self.column + 1 :, rows] = uniforms(keys, positions + ahead[:, None])
