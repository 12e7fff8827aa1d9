"""Joins this process to the ranks of a trainer; a timeout bounds every wait for another rank in a
collective (invariant 8).

No rank sends another one a command: every rank derives its next collective from the log
(`follower.py`). Two facts that no log can hold are in the ranks' rendezvous store, a server in the
process of rank 0: the values that the term begins from (`TermStart`), and, at the end, that rank 0
has ended. A rank that waits for the log asks that server, so it also notices that rank 0 is gone.

There are three process groups, so that no two threads share one: the main threads run the model's
collectives on the first, the publishing threads theirs on `writing`, and a rank whose collective
failed probes the others on `probes`.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollstream.consumers.trainer.sharded.rank_plan import rank_of
from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing, RollstreamError
from rollstream.storage.checkpoints import CheckpointId

log = logging.getLogger(__name__)

PORT_KEY, START_KEY, END_KEY = "rollstream/port", "rollstream/start", "rollstream/end"
CONNECT_S = 1.0
PAUSE_S = 0.1
ROLL_CALL_S = 2.0
"""Longest wait for each rank in a roll call; a closed connection fails at once."""


def rendezvous_store(timeout_s: float, environment: Mapping[str, str] = os.environ) -> TCPStore:
    """Open the key-value store through which ranks find each other's addresses; each start has a
    new one. Raises `RuntimeError` if rank 0 does not open it in time.

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
    """Another rank is gone or does not answer: this rank ends too, and all ranks restart."""


class TermStart(Struct, frozen=True):
    """Holds the values from which all ranks begin a term. All ranks load the first of `checkpoints`
    that no rank finds damaged; it contains the ledger's position.
    """

    term: int
    model: str
    """Hash of the starting model."""
    settings: str
    """Hash of settings and model files."""
    checkpoints: tuple[CheckpointId, ...]
    """The checkpoints that rank 0 listed after it had fenced earlier terms, newest first."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Connects this process (`rank` of `size`) to the other ranks through the process groups of the
    module docstring; `timeout_s` bounds every wait for one of them.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    writing: dist.ProcessGroup
    probes: dist.ProcessGroup
    store: TCPStore
    timeout_s: float
    _probing: threading.Lock = field(default_factory=threading.Lock)

    def announce_start(
        self, term: int, model: str, settings: str, checkpoints: Iterable[CheckpointId]
    ) -> None:
        """Publish the `TermStart` for which the other ranks wait in `await_start`. Rank 0 calls
        this once.
        """
        start = TermStart(term, model, settings, tuple(checkpoints))
        self.store.set(START_KEY, msgspec.json.encode(start).decode())

    def await_start(self, turned: Callable[[], object]) -> TermStart | None:
        """Wait without limit until rank 0 holds its term, and return its `TermStart`; None if rank
        0 ended before. `turned` is called before each pause. Raises `RankLost` if rank 0 is gone.
        """
        while not self._is_set(START_KEY):
            if self.has_ended():
                return None
            turned()
            time.sleep(PAUSE_S)
        return msgspec.json.decode(self.store.get(START_KEY), type=TermStart)

    def has_ended(self) -> bool:
        """Return whether rank 0 has ended without an error. Raises `RankLost` if rank 0 is gone or
        silent.
        """
        return self._is_set(END_KEY)

    def end(self) -> None:
        """End together: returns once rank 0 and then every other rank has called this."""
        if self.rank == 0:
            self.store.set(END_KEY, "1")
        while not self.has_ended():
            time.sleep(PAUSE_S)
        with self.collective():  # rank 0's store must live until all ranks have read END_KEY
            dist.barrier(self.writing)  # pyright: ignore[reportUnknownMemberType]

    def gather(self, value: Any, type_: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return, at every rank, the values of all ranks in the order of ranks; a collective.
        Values travel as msgpack: no received data is ever executed (no pickle).
        """
        mine = msgspec.msgpack.encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group)  # pyright: ignore[reportUnknownMemberType]
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group)  # pyright: ignore[reportUnknownMemberType]
        parts = (
            data.numpy().tobytes()[: int(size)] for data, size in zip(found, sizes, strict=True)
        )
        return [msgspec.msgpack.decode(part, type=type_) for part in parts]

    @contextmanager
    def together(self) -> Generator[None]:
        """Raise `CorruptObject` at all ranks if one of them finds an object missing or damaged in
        the block. A collective of the main threads.
        """
        problem = ""
        try:
            yield
        except (CorruptObject, ObjectMissing) as error:
            problem = str(error)
        with self.collective():
            problems = [text for text in self.gather(problem, str) if text]
        if problems:
            raise CorruptObject(problems[0])

    @contextmanager
    def collective(self) -> Generator[None]:
        """Raise an error of a collective in the block as `RankLost`, which names the ranks that are
        gone.
        """
        try:
            yield
        except RollstreamError:
            raise
        except RuntimeError as error:  # collectives raise no more specific type
            gone = self._roll_call()
            if gone:
                what = f"rank {', '.join(map(str, gone))} of the trainer is gone"
            else:
                limit = f"{self.timeout_s:g} s (trainer.ranks_timeout_s)"
                what = f"a rank of the trainer failed or does not answer within {limit}"
            raise RankLost(f"{what}; all ranks end and restart together ({error})") from error

    def _is_set(self, key: str) -> bool:
        """Return whether the key is in the store. A separate thread asks, because the store's
        client has no timeout for this call (torch 2.13), and rank 0 may hang.
        """
        answers: SimpleQueue[bool | RuntimeError] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self.store.check([key]))
            except RuntimeError as error:
                answers.put(error)

        threading.Thread(target=ask, name="asks rank 0", daemon=True).start()
        try:
            answer = answers.get(timeout=self.timeout_s)
        except Empty:
            limit = f"{self.timeout_s:g} s (trainer.ranks_timeout_s)"
            answer = RuntimeError(f"no answer within {limit}")
        if isinstance(answer, RuntimeError):
            raise RankLost(f"rank {self.rank}: rank 0 is gone or silent ({answer})") from answer
        return answer

    def _roll_call(self) -> list[int]:
        """Return the ranks whose connection is closed. A probe that times out does not count as a
        loss: a busy rank does not receive it.
        """

        def is_gone(rank: int) -> bool:
            began = time.monotonic()
            try:
                work = dist.isend(torch.zeros(1), rank, group=self.probes)
                if work is not None:
                    work.wait(timedelta(seconds=ROLL_CALL_S))
            except RuntimeError:
                return time.monotonic() - began < ROLL_CALL_S / 2
            return False

        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._probing, ThreadPoolExecutor(self.size) as pool:
            found = list(pool.map(is_gone, others))
        return [rank for rank, gone in zip(others, found, strict=True) if gone]


@contextmanager
def join_ranks(device: str, timeout_s: float) -> Generator[Ranks]:
    """Run the block once all ranks have joined, and end together. Raises `RankLost` if a rank does
    not join in time.

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
        writing = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
        probes = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:
        raise RankLost(f"the trainer's ranks did not all join: {error}") from error
    assert isinstance(writing, dist.ProcessGroup)  # every rank is in it
    assert isinstance(probes, dist.ProcessGroup)
    ranks = Ranks(dist.get_rank(), size, mine, mesh, writing, probes, store, timeout_s)
    log.info("rank %d of %d on %s", ranks.rank, ranks.size, mine)
    try:
        yield ranks
    except SystemExit:  # stopped while it waited for the lease
        ranks.end()
        raise
    ranks.end()
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
