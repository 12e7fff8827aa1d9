"""Collectives over the model's tensors: gather a tensor's rows at its owner, scatter them from
rank 0, and gather small values at all ranks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rollstream.consumers.trainer.sharded.rank_plan import rows_per_rank, slice_of
from rollstream.consumers.trainer.sharded.messages import decode, encode
from rollstream.consumers.trainer.sharded.ranks import Ranks

_V = TypeVar("_V")


def gather_rows(mine: Tensor, shape: tuple[int, ...], owner: int, ranks: Ranks) -> Tensor | None:
    """The whole tensor of this shape, in new host memory, at rank `owner`; None at the others."""
    if ranks.size == 1:
        return mine.detach().to("cpu", copy=True)
    padded = _padded(mine.detach(), shape, ranks)
    parts = None
    if ranks.rank == owner:
        parts = [torch.empty_like(padded) for _ in range(ranks.size)]
    dist.gather(padded, parts, dst=owner)
    return None if parts is None else torch.cat(parts)[: shape[0]].to("cpu", copy=True)


def scatter_rows(whole: Tensor | None, into: Tensor, shape: tuple[int, ...], ranks: Ranks) -> None:
    """Copy this rank's rows of rank 0's whole tensor into `into`."""
    received = torch.empty(
        (rows_per_rank(shape[0], ranks.size), *shape[1:]), dtype=into.dtype, device=into.device
    )
    parts = None
    if ranks.rank == 0:
        assert whole is not None
        slices = (slice_of(shape[0], rank, ranks.size) for rank in range(ranks.size))
        own = [whole[start:end].to(into.device, into.dtype) for start, end in slices]
        parts = [_padded(one, shape, ranks) for one in own]
    dist.scatter(received, parts, src=0)
    into.copy_(received[: into.shape[0]])


def gather_values(value: _V, type_: type[_V], ranks: Ranks) -> list[_V]:
    """The values of all ranks, in the order of ranks, at every rank."""
    mine = encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.size)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in range(ranks.size)]
    dist.all_gather(found, padded)
    pairs = zip(found, sizes, strict=True)
    return [decode(data.numpy().tobytes()[: int(size)], type_) for data, size in pairs]


def _padded(rows: Tensor, shape: tuple[int, ...], ranks: Ranks) -> Tensor:
    """The rows, padded to the number that every rank sends."""
    each = rows_per_rank(shape[0], ranks.size)
    if rows.shape[0] == each:
        return rows.contiguous()
    padded = rows.new_zeros((each, *shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded
