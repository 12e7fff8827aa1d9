"""Divides work and tensors among the ranks that train one model, by pure functions of counts, sizes
and the number of ranks: no communication.

`rank_of` reads this process's rank from the environment variables of `torchrun`, which `rollstream
train` sets too.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RankTurn:
    """The micro-batch that one rank computes in one round. With `counts` False its gradient gets
    weight zero.
    """

    micro_batch: int
    counts: bool


def rounds(micro_batches: int, ranks: int) -> list[tuple[RankTurn, ...]]:
    """Returns the rounds of an update: element r of a round is the turn of rank r. Micro-batch k
    (from 0 within its update, in the order of the takes) is trained in round k // `ranks` by rank k
    % `ranks`.
    """
    assert ranks >= 1
    return [
        tuple(
            # A pass is a collective that all ranks enter: without work a rank repeats the round's
            # first micro-batch at weight zero.
            RankTurn(k, True) if k < micro_batches else RankTurn(first, False)
            for k in range(first, first + ranks)
        )
        for first in range(0, micro_batches, ranks)
    ]


def parts_of_round(samples: Sequence[int], shortages: int) -> int:
    """Returns the number of parts in which each rank trains its micro-batch of a round after
    `shortages` lacks of memory: whole, halves, quarters, at most as many as the largest of the
    micro-batches has `samples`.
    """
    return min(2**shortages, max(samples))


def divide(samples: int, parts: int) -> list[tuple[int, int]]:
    """Returns `start` and `end` of each part of a micro-batch, in order, with sizes that differ by
    at most one. The first part is never empty; others are if there are more parts than samples.
    """
    cuts = [-(-samples * part // parts) for part in range(parts + 1)]
    return list(pairwise(cuts))


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns, by tensor name, the rank that gathers and writes the tensor: from the largest to the
    smallest, each to the rank with the least load so far. No rank gets more than the mean plus one
    tensor (Graham's longest processing time).
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
    """Returns the rows of a rank's slice, padding included: `rows` / `ranks`, rounded up. The last
    ranks may hold fewer or none (the rule of `torch.chunk`, which FSDP follows).
    """
    return -(-rows // ranks)


def slice_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns `start` and `end` of the rows that this rank holds of a tensor with `rows` rows."""
    each = rows_per_rank(rows, ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables of `torchrun`: rank, number of ranks, number on this machine, host and port of the
rendezvous.
"""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as one rank of a group (`RANK` or `WORLD_SIZE` is set).
    Raises `ConfigurationError` if another one of `VARIABLES` is then missing.
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
    """Returns the rank of this process; 0 if it was not started as one."""
    return int(environment["RANK"]) if is_launched(environment) else 0
