"""Divides work and tensors among the ranks that train one model, by pure functions of counts and
sizes: no communication.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RankTurn:
    """A micro-batch in one round; with `counts` False its gradient gets weight zero."""

    micro_batch: int
    counts: bool


def rounds(micro_batches: int, ranks: int) -> list[tuple[RankTurn, ...]]:
    """Element r of a round is the turn of rank r: micro-batch k (from 0 within its update, in the
    order of the takes) is trained in round k // `ranks` by rank k % `ranks`.
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
    """Returns parts in which each rank trains its micro-batch of a round after `shortages` lacks of
    memory: whole, halves, quarters, at most the `samples` of the largest micro-batch.
    """
    return min(2**shortages, max(samples))


def divide(samples: int, parts: int) -> list[tuple[int, int]]:
    """`start` and `end` of each part, with sizes that differ by at most one; the first is never
    empty.
    """
    cuts = [-(-samples * part // parts) for part in range(parts + 1)]
    return list(pairwise(cuts))


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank that gathers and writes each tensor: from the largest on, each to the least loaded
    rank. No rank gets more than the mean plus one tensor (Graham's longest processing time).
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
    """The rows of a rank's slice, padding included; the last ranks may hold fewer or none (the rule
    of `torch.chunk`, which FSDP follows).
    """
    return -(-rows // ranks)


def slice_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """`start` and `end` of this rank's rows."""
    each = rows_per_rank(rows, ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Those of `torchrun`, which `rollstream train` sets too."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one rank of a group (`RANK` or `WORLD_SIZE` is set). Raises
    `ConfigurationError` if another one of `VARIABLES` is then missing.
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
    """Returns 0 if this process was not started as a rank."""
    return int(environment["RANK"]) if is_launched(environment) else 0
