"""Joins this process to the ranks of a trainer; a timeout bounds every wait for another rank
(invariant 8).

There are three process groups, so that no two threads share one: the model's collectives (main
threads only), rank 0's commands to the others (under one lock), and the replies of their writing
threads.
"""

import logging
import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollstream.consumers.trainer.sharded.rank_plan import rank_of
from rollstream.errors import ConfigurationError, RollstreamError

log = logging.getLogger(__name__)

PORT_KEY = "rollstream/port"
CONNECT_S = 1.0
PAUSE_S = 0.1


def rendezvous_store(timeout_s: float, environment: Mapping[str, str] = os.environ) -> TCPStore:
    """The key-value store through which ranks find each other's addresses, new for every start;
    `RuntimeError` if rank 0 does not open it in time.

    `torchrun` keeps one store of its own through all restarts of its processes (torch 2.13), so
    entries of the previous start are still in it, and gloo would connect to addresses of dead
    processes. The ranks therefore read a single entry from it, the port of rank 0's own store, and
    retry until that port accepts a connection.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    rank, timeout = rank_of(environment), timedelta(seconds=timeout_s)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False)
    agent_store = TCPStore(host, port, None, False, timeout)
    if rank == 0:
        own = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        agent_store.set(PORT_KEY, str(own.port))
        return own
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        own_port = int(agent_store.get(PORT_KEY))
        try:
            socket.create_connection((host, own_port), CONNECT_S).close()
        except OSError:  # the port is of a previous start
            time.sleep(PAUSE_S)
            continue
        return TCPStore(host, own_port, None, False, timeout)
    raise RuntimeError(f"rank 0 did not open its store at {host} within {timeout_s:g} s")


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
        commands = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
        replies = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
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
