"""Which rank does what: pure functions of counts, sizes and the number of ranks, so every rank that
asks gets the same answer and nothing has to be negotiated.

Micro-batches are numbered within their update in the order of the takes that name them. A forward
or backward pass of a sharded model is a collective, so every rank takes part in every round: ranks
short of work run the round's first micro-batch at weight zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank does in a round: a micro-batch, and whether it counts."""

    micro_batch: int
    counts: bool


def rounds(micro_batches: int, ranks: int) -> list[tuple[Turn, ...]]:
    """One turn for each rank and round: micro-batch k is the turn of rank k mod `ranks` in round
    k div `ranks`; only the last round can be filled up.
    """
    assert ranks >= 1
    return [
        tuple(
            Turn(k, True) if k < micro_batches else Turn(first, False)
            for k in range(first, first + ranks)
        )
        for first in range(0, micro_batches, ranks)
    ]


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank that holds each tensor whole and writes it, balanced: the largest first, each to the
    rank that has least (Graham's LPT rule: no rank has more than the mean and one tensor).
    """
    assert ranks >= 1
    loads = [0] * ranks
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        owner[name] = rank
        loads[rank] += sizes[name]
    return {name: owner[name] for name in sizes}


def rows_per_rank(rows: int, ranks: int) -> int:
    """Rows of every rank's slice of a tensor, padding included; the last slices may be short or
    empty (`torch.chunk`'s rule, which FSDP follows).
    """
    return -(-rows // ranks)


def slice_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows `[start, end)` of a tensor that a rank has."""
    each = rows_per_rank(rows, ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)
