"""Connects the processes that train one model together: the ranks of a trainer, led by rank 0.

`join_ranks` joins this process to them and yields a `Ranks`. Ranks exchange tensors in collectives,
operations that all ranks enter together. No rank sends another one a command: each derives its next
collective from the log (`follower.py`). Only three facts are in a key-value store in rank 0's
process: what a term begins from (`TermStart`), takes on which a rank failed, and that rank 0 has
ended. A timeout bounds every wait in a collective (invariant 8); when a rank is lost, all end and
restart.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
from rollstream.streams.records import TakeFailed

log = logging.getLogger(__name__)

PORT_KEY, START_KEY, END_KEY = "rollstream/port", "rollstream/start", "rollstream/end"
FAILED_KEY, RECORDED_KEY = "rollstream/failed", "rollstream/recorded"
CONNECT_S = 1.0  # longest wait of one attempt to connect to rank 0's store
PAUSE_S = 0.1  # between two attempts, and between two looks at a key of the store
ROLL_CALL_S = 2.0
"""Longest wait for each rank in a roll call, which probes all other ranks after a failed
collective; the probe of a closed connection fails at once.
"""
REPORT_S = 10.0  # longest wait of a failed rank until rank 0 has recorded its failure


def rendezvous_store(timeout_s: float, environment: Mapping[str, str] = os.environ) -> TCPStore:
    """Open the key-value store through which ranks find each other's addresses (the rendezvous);
    each start of the ranks has a new one, in the process of rank 0. Raises `RuntimeError` if rank 0
    does not open it in time.

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
        own_store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        agent_store.set(PORT_KEY, str(own_store.port))
        return own_store
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
    """Another rank is gone or does not answer: this rank must end too, and all ranks restart."""


class TermStart(Struct, frozen=True):
    """Holds what all ranks begin a term from. Each rank compares the two hashes with its own. All
    ranks load the first of `checkpoints` that no rank finds damaged, and read the ledger from the
    position in that checkpoint.
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
    """Connects this process (`rank` of `size`) to the other ranks; `timeout_s` bounds every
    collective and every request to `store`.

    There are three process groups, so that no two threads share one: the main threads run the
    model's collectives on the default group, the publishing threads theirs on `writing`, and a rank
    whose collective failed probes the others on `probes`.

    `store` is the key-value store of `rendezvous_store`, a server in the process of rank 0. It
    holds the `TermStart` of the term, the first failure that a rank reports, and, at the end, the
    fact that rank 0 has ended. A rank that waits for new records in the log also asks this server,
    so it notices when rank 0 is gone.
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
    """Held by the one thread that probes on `probes`."""

    def announce_start(
        self, term: int, model: str, settings: str, checkpoints: Iterable[CheckpointId]
    ) -> None:
        """Publish the `TermStart` for which the other ranks wait in `await_start`. Rank 0 calls
        this once.
        """
        start = TermStart(term, model, settings, tuple(checkpoints))
        self.store.set(START_KEY, msgspec.json.encode(start).decode())

    def await_start(self, on_pause: Callable[[], object]) -> TermStart | None:
        """Wait without limit until rank 0 holds its term, and return its `TermStart`; None if rank
        0 ended before it held one. `turned` is called before each pause, so that the caller can
        show that it lives. Raises `RankLost` if rank 0 is gone.
        """
        while not self._is_set(START_KEY):
            if self.has_ended():
                return None
            on_pause()
            time.sleep(PAUSE_S)
        return msgspec.json.decode(self.store.get(START_KEY), type=TermStart)

    def has_ended(self) -> bool:
        """Returns whether rank 0 has ended without an error. Raises `RankLost` if rank 0 is gone or
        silent.
        """
        return self._is_set(END_KEY)

    def end(self) -> None:
        """End together with the other ranks: wait without limit until rank 0 has called this, and
        then, in a collective, until every rank has. Raises `RankLost` if a rank is gone.
        """
        if self.rank == 0:
            self.store.set(END_KEY, "1")
        while not self.has_ended():
            time.sleep(PAUSE_S)
        with self.collective():  # rank 0's store must live until all ranks have read END_KEY
            dist.barrier(self.writing)  # pyright: ignore[reportUnknownMemberType]

    def report(self, failures: Sequence[TakeFailed]) -> None:
        """Pass the takes on which this rank failed to rank 0 (`recording`), and wait until they are
        recorded, for at most `REPORT_S`. Of several ranks that fail only the first one's report
        counts. Logs an error if rank 0 is gone or does not record them.
        """
        try:
            self.store.compare_set(FAILED_KEY, "", msgspec.json.encode(failures).decode())
            give_up = time.monotonic() + REPORT_S
            while not self._is_set(RECORDED_KEY):
                if time.monotonic() > give_up:
                    raise RankLost(f"no answer within {REPORT_S:g} s")
                time.sleep(PAUSE_S)
        except (RuntimeError, RankLost) as error:
            log.error("rank %d: rank 0 did not record the failure: %s", self.rank, error)

    @contextmanager
    def recording(self, record: Callable[[Sequence[TakeFailed]], None]) -> Generator[None]:
        """While the block runs, pass the takes on which another rank failed to `record`. To be
        called on rank 0.

        A thread waits for them, because the main thread may be in a collective with the rank that
        failed, and over NCCL that may end only with the process.
        """
        has_ended = threading.Event()

        def wait() -> None:
            while not self.store.check([FAILED_KEY]):
                if has_ended.wait(PAUSE_S):
                    return
            record(msgspec.json.decode(self.store.get(FAILED_KEY), type=list[TakeFailed]))
            self.store.set(RECORDED_KEY, "1")

        waiting = threading.Thread(target=wait, name="records failures", daemon=True)
        waiting.start()
        try:
            yield
        finally:
            has_ended.set()
            waiting.join()

    def gather(self, value: Any, type_: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return, at every rank, the values of all ranks in the order of ranks. A collective, of
        the default group unless `group` is given. Values travel as msgpack: no received data is
        ever executed (no pickle).
        """
        mine = msgspec.msgpack.encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group)  # pyright: ignore[reportUnknownMemberType]
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group)  # pyright: ignore[reportUnknownMemberType]
        parts = (
            data.numpy().tobytes()[: int(size)] for data, size in zip(received, sizes, strict=True)
        )
        return [msgspec.msgpack.decode(part, type=type_) for part in parts]

    @contextmanager
    def together(self) -> Generator[None]:
        """Run the block, and raise `CorruptObject` at all ranks if it raised `CorruptObject` or
        `ObjectMissing` at any of them. A collective of the main threads at the block's end.
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
        """Run the block, which contains a collective. If the collective fails, raise `RankLost`,
        which names the ranks whose connections are closed.
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
        """Returns whether the key is in the store. A separate thread asks, because the store's
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
        """Returns the ranks whose connection is closed. A rank whose probe times out is not one of
        them: it may only be too busy to receive the probe in time.
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
            are_gone = list(pool.map(is_gone, others))
        return [rank for rank, gone in zip(others, are_gone, strict=True) if gone]


@contextmanager
def join_ranks(device: str, timeout_s: float) -> Generator[Ranks]:
    """Wait until all ranks have joined, run the block with this process's `Ranks`, and then end
    together with the others (`Ranks.end`). Raises `RankLost` if a rank does not join in time.

    `device` is `cpu` or `cuda`; a process uses the GPU with the number of its rank on its machine.
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
    """Returns the device of this process, and the backend of its default process group. Raises
    `ConfigurationError` if its machine has more ranks than GPUs.
    """
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
