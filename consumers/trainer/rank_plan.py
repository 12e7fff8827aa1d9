"""Divides work and tensors among the ranks, the processes that train one model together: which rank
trains which micro-batch (`rounds`), in how many parts after memory ran out (`parts_of_round`),
which rank writes which tensor (`owners`), and which rows of a tensor each one holds (`slice_of`).
These are pure functions of counts, sizes and the number of ranks, so every rank computes the same
result without communication.

`rank_of` returns the rank of this process, a number from 0, from the environment variables of
`torchrun`. `rollstream train` sets these too when it starts several processes itself.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RankTurn:
    """Names the micro-batch that one rank computes in one round. With `counts` False its gradient
    gets weight zero, so the rank takes part in the round without changing the result.
    """

    micro_batch: int
    counts: bool


def rounds(micro_batches: int, ranks: int) -> list[tuple[RankTurn, ...]]:
    """Returns the rounds of an update with this number of micro-batches: in each round every rank
    computes one micro-batch, and element r of a round is the turn of rank r. Micro-batch k is
    trained in round k // `ranks` by rank k % `ranks`. Micro-batches are numbered from 0 within
    their update, in the order of the takes that name them.

    Each rank holds only a part of the model's tensors, so a forward or backward pass is a
    collective: an operation that all ranks must enter together. A rank without work in the last
    round therefore computes the first micro-batch of the round again, with weight zero.
    """
    assert ranks >= 1
    return [
        tuple(
            RankTurn(k, True) if k < micro_batches else RankTurn(first, False)
            for k in range(first, first + ranks)
        )
        for first in range(0, micro_batches, ranks)
    ]


def parts_of_round(samples: Sequence[int], shortages: int) -> int:
    """Returns the number of parts in which each rank trains its micro-batch of a round, if memory
    ran out `shortages` times on the round: whole, halves, quarters. `samples` are the numbers of
    samples in the round's micro-batches; no round has more parts than its largest one has samples.
    """
    return min(2**shortages, max(samples))


def divide(samples: int, parts: int) -> list[tuple[int, int]]:
    """Returns `start` and `end` of each part of a micro-batch: all samples in their order, in parts
    whose sizes differ by at most one. The first part is never empty; others are if there are
    more parts than samples.
    """
    cuts = [-(-samples * part // parts) for part in range(parts + 1)]
    return list(pairwise(cuts))


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return, by tensor name, the rank that gathers the tensor from all ranks and writes it. The
    load is balanced by `sizes`: tensors are given out from the largest to the smallest, each to the
    rank with the least load so far. No rank gets more than the mean plus one tensor (Graham's rule
    of the longest processing time).
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
    """Returns the number of rows in a rank's slice of a tensor with `rows` rows, padding included:
    `rows` / `ranks`, rounded up. The slices of the last ranks may hold fewer rows or none
    (the rule of `torch.chunk`, which FSDP follows).
    """
    return -(-rows // ranks)


def slice_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns `start` and `end`: of a tensor with `rows` rows, this rank holds `[start, end)`."""
    each = rows_per_rank(rows, ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables of `torchrun`: this rank, the number of ranks, the rank's number on its machine,
and the host and port at which the ranks find each other.
"""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process was started as one rank of a group: whether `RANK` or
    `WORLD_SIZE` is set. Raises `ConfigurationError` if another one of `VARIABLES` is then missing.
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
    """Returns the rank of this process; 0 if it was not started as a rank (`is_launched`)."""
    return int(environment["RANK"]) if is_launched(environment) else 0
