"""Determines the rank of this process, and divides work and tensors among the ranks.

The rank comes from the environment variables of `torchrun`, which Rollstream's supervisor sets as
well. The division is a pure function of counts, sizes and the number of ranks, so every rank
computes the same result without communication.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RankTurn:
    """Names a rank's micro-batch in a round; with `counts` False its gradient has weight zero."""

    micro_batch: int
    counts: bool


def rounds(micro_batches: int, ranks: int) -> list[tuple[RankTurn, ...]]:
    """Return one turn for each round and rank: rank k mod `ranks` trains micro-batch k in round k
    div `ranks`. Micro-batches are numbered within their update in the order of the takes that name
    them.

    A forward or backward pass of a sharded model is a collective, so every rank takes part in every
    round: ranks without work run the round's first micro-batch at weight zero. Only the last round
    can have turns that do not count.
    """
    assert ranks >= 1
    return [
        tuple(
            RankTurn(k, True) if k < micro_batches else RankTurn(first, False)
            for k in range(first, first + ranks)
        )
        for first in range(0, micro_batches, ranks)
    ]


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return, by tensor name, the rank that gathers and writes the tensor, balanced by `sizes`: the
    largest tensor first, each to the rank with the least load (Graham's rule of the longest
    processing time: no rank has more than the mean plus one tensor).
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
    """Return the number of rows in every rank's slice of a tensor, padding included; the last
    slices may be short or empty (`torch.chunk`'s rule, which FSDP follows).
    """
    return -(-rows // ranks)


def slice_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return `start` and `end`: a rank holds the rows `[start, end)` of a tensor with `rows`."""
    each = rows_per_rank(rows, ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a rank. Raises `ConfigurationError` if only some of the
    variables are set.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return False
    missing = [name for name in VARIABLES if not environment.get(name)]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} must be set where RANK or WORLD_SIZE is: start the trainer's "
            "processes with `torchrun --nproc-per-node N -m -- rollstream train CONFIG`, or unset "
            "both"
        )
    return True


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank; 0 if there is only one process."""
    return int(environment["RANK"]) if is_launched(environment) else 0
