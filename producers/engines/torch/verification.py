"""One forward pass over the drafts of all rows: packing its input, and accepting drafted tokens.

At each position the token is drawn that plain sampling with the key (seed, trajectory, position)
draws there; a drafted token is accepted while it is equal. This has the distribution and the
acceptance rate of rejection sampling for drafts of probability 1 (Leviathan, Kalman, Matias, ICML
2023), and gives the same tokens as a run without drafts, up to rounding.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollstream.producers.engines.draws import uniforms
from rollstream.producers.engines.torch.decoder import DraftedTokens
from rollstream.producers.engines.torch.sequence import TorchSequence


@dataclass(frozen=True, slots=True)
class PackedDrafts:
    """The input of a pass; `row_of` (n,) is the row of each token, `drawn` (n, 1) the uniform with
    which the token after it is drawn.
    """

    drafted: DraftedTokens
    row_of: torch.Tensor
    drawn: torch.Tensor


def pack_drafts(rows: Many[TorchSequence], drafts: Many[Many[int]], device: torch.device) -> PackedDrafts:
    """Pack each row's newest token, which is not cached yet, and the row's draft after it."""
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
    drafted = DraftedTokens(
        ids=torch.tensor(ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=slots,
        rows=len(rows),
        ahead=ahead,
    )
    drawn = torch.from_numpy(uniforms(keys, positions + 1)).to(device)
    return PackedDrafts(drafted, torch.from_numpy(row_of).to(device), drawn.unsqueeze(1))


def count_accepted(drawn: Many[int], draft: Many[int], stop: Many[int]) -> tuple[int, bool]:
    """How many of the drawn tokens the row gains: the accepted ones and one more. The second value
    is whether the last of these is a stop token; tokens after a stop token are not gained.
    """
    for index, token in enumerate(drawn):
        if token in stop:
            return index + 1, True
        if index == len(draft) or token != draft[index]:
            return index + 1, False
    raise AssertionError("one token more is drawn than was drafted")
