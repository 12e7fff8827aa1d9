"""Joins this process to the ranks of a trainer; a timeout bounds every wait for another rank
(invariant 8).

There are three process groups, so that no two threads share one: the model's collectives (main
threads only), rank 0's commands to the others (under one lock), and the replies of their writing
threads.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollstream.consumers.trainer.sharded.rank_environment import rank_of
from rollstream.consumers.trainer.sharded.meeting import rendezvous_store
from rollstream.errors import ConfigurationError, RollstreamError

log = logging.getLogger(__name__)


class RankLost(RollstreamError, ConnectionError):
    """Another rank is gone or does not answer: this one ends too, and all of them restart."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank, the number of ranks, and the groups through which they communicate."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    commands: dist.ProcessGroup
    replies: dist.ProcessGroup
    timeout_s: float


@contextmanager
def join_ranks(device: str, timeout_s: float) -> Generator[Ranks]:
    """Run the block once all ranks have joined; `RankLost` if one does not join in time.

    `device` is `cpu` or `cuda`; each process of a machine uses the GPU of its local rank.
    """
    mine, backend = _device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, size = rendezvous_store(timeout_s), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank_of(), world_size=size
        )
        mesh = init_device_mesh(mine.type, (dist.get_world_size(),))
        commands = dist.new_group(backend="gloo", timeout=timeout)
        replies = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise RankLost(f"the trainer's ranks did not all join: {error}") from error
    assert isinstance(commands, dist.ProcessGroup)  # every rank is in it
    assert isinstance(replies, dist.ProcessGroup)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), mine, mesh, commands, replies, timeout_s)
    log.info("rank %d of %d on %s", ranks.rank, ranks.size, mine)
    yield ranks
    # Only after a clean end: with a rank gone, destroying the groups would hang.
    dist.destroy_process_group()


def _device(name: str) -> tuple[torch.device, str]:
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise ConfigurationError(
            f"local rank {local} has no device of its own: PyTorch sees {count} here; start at "
            "most that many processes on this machine (trainer.processes, or torchrun's "
            "--nproc-per-node)"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local), "cpu:gloo,cuda:nccl"
