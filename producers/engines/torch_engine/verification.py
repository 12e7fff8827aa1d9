"""One forward pass over the drafts of all rows: what goes in, and what of it is accepted.

At each position the token is drawn that plain sampling with the key (seed, trajectory, position)
draws there; the draft is right while it is equal. That has the law and the acceptance of rejection
sampling for drafts of probability 1 (Leviathan, Kalman, Matias, ICML 2023), and gives the very
tokens of a run without drafts, up to rounding.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from producers.engines.draws import uniforms
from producers.engines.torch_engine.decoder import Drafted
from producers.engines.torch_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Packed:
    """A pass; `row_of` (n,) is the row of each token, `drawn` (n, 1) the uniform of the one after
    it.
    """

    drafted: Drafted
    row_of: torch.Tensor
    drawn: torch.Tensor


def pack(rows: Many[Sequence], drafts: Many[Many[int]], device: torch.device) -> Packed:
    """The newest token of each row, which is not cached yet, and its draft behind it."""
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
    slots = None
    if len(ids) < ahead * len(rows):
        slots = torch.from_numpy(row_of * ahead + place).to(device)
    drafted = Drafted(
        ids=torch.tensor(ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=slots,
        rows=len(rows),
        ahead=ahead,
    )
    drawn = torch.from_numpy(uniforms(keys, positions + 1)).to(device)
    return Packed(drafted, torch.from_numpy(row_of).to(device), drawn.unsqueeze(1))


def accepted(drawn: Many[int], draft: Many[int], stop: Many[int]) -> tuple[int, bool]:
    """How many of the drawn tokens the row gains, one more than it was guessed right, and whether
    the last of these is a stop token; after one nothing counts.
    """
    for index, token in enumerate(drawn):
        if token in stop:
            return index + 1, True
        if index == len(draft) or token != draft[index]:
            return index + 1, False
    raise AssertionError("as many tokens are drawn as are guessed, and one")
